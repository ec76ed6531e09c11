"""`OuterOptimizer`: replicas train independently for some steps, and then average their weight changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp.distributed.collectives import communicator
from fsdp.distributed.communicator import completed, default_group, during, ranks_of, served_device, summed, uncompiled
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.runtime import Runtime, runtimes
from fsdp.layers.fingerprints import fingerprint
from fsdp.optim_utils.owned import OwnedOptimizer

_ANCHOR, _MOMENTUM, _STEP = "outer_anchor", "outer_momentum", "outer_step"
_KEYS = _ANCHOR, _MOMENTUM, _STEP  # of an optimizer's state


class OuterOptimizer:
    """Averages the weight changes of independently trained replicas every few steps, for slow networks. ::

        # `mesh` is a DeviceMesh of two dimensions: the replicas ("site"), and the ranks of each ("rank").
        model = fsdp.shard(Model(), units={Block}, process_group=mesh["rank"].get_group())
        optimizer = torch.optim.AdamW(model.parameters())
        outer = fsdp.OuterOptimizer(optimizer, mesh["site"], every=50)
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step()

    Each replica is sharded over its own ranks and trained with its own data. After `every` steps, the ranks that hold
    the same shard compute the mean of ``old weights - new weights``, and use it as the gradient of an outer SGD with
    Nesterov momentum; afterwards all replicas have the same weights. By default weights are averaged (local SGD: Stich,
    "Local SGD Converges Fast and Communicates Little", 2018). DiLoCo (Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models", 2023) has ``lr=0.7, momentum=0.9``. Per exchange, a rank
    sends 2 (n - 1) / n of its shard in at least float32, for n replicas.

    The result is not equal to training with the mean of all gradients in each step. The constructor is collective, and
    all replicas must have equal weights.

    Args:
        optimizer: the inner optimizer of this rank's replica, for parameters of the wrapper or of `fully_shard`.
        group: the ranks that hold the same shard, one of each replica: a process group, or a mesh of one dimension.
        every: the number of steps between two exchanges of a parameter.
        lr: the learning rate of the outer optimizer.
        momentum: the momentum of the outer optimizer; at least 0 and less than 1.
        fragments: the number of parts into which the parameters are divided, in the order of the optimizer. Each part
            is exchanged at a different step, so that an exchange is shorter. With multiple parts, the replicas never
            have all weights in common, except after `synchronize`.

    Attributes:
        every, fragments: the arguments.
        lr, momentum: the arguments; they may be changed on all ranks.
        steps: the number of steps.

    Raises:
        TypeError: if `optimizer` is not a torch optimizer, or is an `OwnedOptimizer`.
        NotImplementedError: for complex parameters.
        ValueError: for numbers out of range; if the model is already sharded or replicated over ranks of `group`.
        RuntimeError: on every rank, if replicas differ in weights, shards or arguments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Any,
        *,
        every: int,
        lr: float = 1.0,
        momentum: float = 0.0,
        fragments: int = 1,
    ) -> None:
        with during("fsdp.OuterOptimizer()"):
            if isinstance(group, DeviceMesh):
                group = group.get_group()
            group = default_group(group)
            params = _params(optimizer)
            self._device = served_device(group)
            self._comm = communicator(group, self._device)
            done_by_all(
                [(self._comm,)],
                "construct an OuterOptimizer",
                lambda: _require_possible(optimizer, group, every, lr, momentum, fragments),
            )
            described = [f"every={every}, lr={lr}, momentum={momentum}, fragments={fragments}"]
            described += [f"{tuple(local_part(param).shape)} of {param.dtype}" for param in params]
            agree_on((self._comm,), "arguments and shards of an OuterOptimizer", "; ".join(described))
            values = [fingerprint(local_part(param)) for param in params]
            agree_on(
                (self._comm,),
                "weights in their replicas at the construction of an OuterOptimizer, which needs equal seeds or a "
                "common checkpoint",
                str(values),
                "other weights",
            )
        self.every, self.lr, self.momentum, self.fragments, self.steps = every, lr, momentum, fragments, 0
        self._optimizer = optimizer
        self._params = params
        size, more = divmod(len(params), fragments)
        ends = [number * size + min(number, more) for number in range(fragments + 1)]
        self._fragments = [params[begin:end] for begin, end in itertools.pairwise(ends)]
        wide = {param.dtype: torch.promote_types(param.dtype, torch.float32) for param in params}
        self._anchors = {id(param): _values(param).to(wide[param.dtype], copy=True) for param in params}
        self._momenta = {id(param): torch.zeros_like(self._anchors[id(param)]) for param in params}
        _load_unchanged(optimizer)

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the inner optimizer, and exchange the parameters that are due.

        Collective over `group` in steps with an exchange. Call this method after each step of the inner optimizer,
        including steps that a gradient scaler has skipped.

        Returns:
            Whether parameters were exchanged.

        Raises:
            RuntimeError: if the inner optimizer has different parameters than at construction, because new ones would
                not be exchanged; if `load_from` was not called after loading a state of the outer optimizer.
        """
        if {*map(id, _params(self._optimizer))} != self._anchors.keys():
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} has other parameters than when this OuterOptimizer was "
                "constructed: construct a new OuterOptimizer, on all ranks"
            )
        if any(_STEP in state for state in self._optimizer.state.values()):
            raise RuntimeError(
                f"the {type(self._optimizer).__name__} has loaded the state of an OuterOptimizer, which has not read "
                "it yet: call load_from(optimizer) after loading, on all ranks, and step() outside of stored_in()"
            )
        self.steps += 1
        due = [
            number
            for number in range(self.fragments)
            if (self.steps + number * self.every // self.fragments) % self.every == 0
        ]
        for number in due:
            self._exchange(number)
        return bool(due)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Collective over `group`. Exchange all parameters now: before an evaluation or at the end of the training."""
        for number in range(self.fragments):
            self._exchange(number)

    @uncompiled
    def _exchange(self, number: int) -> None:
        params = self._fragments[number]
        if not any(_values(param).numel() for param in params):
            return
        anchors, momenta = ([held[id(param)] for param in params] for held in (self._anchors, self._momenta))
        change = torch.cat([anchor - _values(param) for param, anchor in zip(params, anchors, strict=True)])
        what = f"outer exchange {number} after step {self.steps}"
        total = completed(summed(self._comm, change.to(self._device), change.dtype, what, ("outer", number)))
        mean = total.to(change.device) / self._comm.world_size
        parts = mean.split([anchor.numel() for anchor in anchors])
        for param, anchor, momentum, part in zip(params, anchors, momenta, parts, strict=True):
            momentum.mul_(self.momentum).add_(part)
            anchor.sub_(part + self.momentum * momentum, alpha=self.lr)
            local = local_part(param)
            local.copy_(anchor.view(local.shape))

    @contextmanager
    def stored_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Add the state of the outer optimizer to the inner optimizer's state, inside the context. ::

            with outer.stored_in(optimizer):
                fsdp.save(f"replica-{mesh.get_local_rank('site')}", model, optimizer)

        For each parameter, the state contains the weights after the last exchange and the momentum, both in the
        parameter's shape and at least float32, and the number of steps. All functions that save and reshard optimizer
        state include this state. The inner state differs between replicas, so save each replica in a separate folder.

        Entering the context is collective over the ranks of this replica.

        Raises:
            ValueError: if `optimizer` is not the optimizer that was passed to the constructor.
            RuntimeError: for a parameter that other replicas have changed and this replica has never stepped, because
                the optimizer cannot hold its state; on every rank of the replica, with the reason, if a rank fails.
        """

        def store() -> dict[Any, dict[str, Tensor]]:
            self._require_own(optimizer)
            # Except for SGD, torch's optimizers do not support state of a parameter without the optimizer's keys.
            takes_all = isinstance(optimizer, torch.optim.SGD) or not any(optimizer.state.values())
            found = [param for param in self._params if takes_all or optimizer.state.get(param)]
            self._require_nothing_else(found)
            return {param: self._state_of(param) for param in found}

        with during("OuterOptimizer.stored_in()"):
            everyone = [runtime.root.everyone for runtime, _ in _sharding(self._params)]
            stored = done_by_all(dict.fromkeys(everyone), "store the state of an OuterOptimizer", store)
        for param, state in stored.items():
            optimizer.state[param].update(state)
        try:
            yield
        finally:
            for param in stored:  # new dictionaries: a state_dict() from inside the context refers to the old ones
                rest = {key: value for key, value in optimizer.state[param].items() if key not in _KEYS}
                optimizer.state[param] = rest
                if not rest:
                    del optimizer.state[param]

    def _state_of(self, param: Any) -> dict[str, Tensor]:
        found = {}
        for key, held in ((_ANCHOR, self._anchors), (_MOMENTUM, self._momenta)):
            found[key] = torch.zeros_like(param, dtype=held[id(param)].dtype, requires_grad=False)
            local = local_part(found[key])
            local.copy_(held[id(param)].view(local.shape))
        found[_STEP] = torch.tensor(self.steps, dtype=torch.float32, device="cpu")
        return found

    def load_from(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective over `group`. Move the outer optimizer's state from a loaded optimizer state to this object.

        For a parameter without outer state, the current value is used, with zero momentum.

        Raises:
            ValueError: if `optimizer` is not the optimizer that was passed to the constructor.
            RuntimeError: on every rank, if replicas have loaded states of different exchanges.
        """
        self._require_own(optimizer)
        for param in self._params:
            state = optimizer.state.get(param, {})
            anchor, momentum, steps = (state.pop(key, None) for key in _KEYS)
            self._anchors[id(param)].copy_(_values(param if anchor is None else anchor))
            self._momenta[id(param)].zero_()
            if momentum is not None:
                self._momenta[id(param)].copy_(_values(momentum))
            self.steps = self.steps if steps is None else int(steps)
            if not state:
                optimizer.state.pop(param, None)
        held = [fingerprint(value) for values in (self._anchors, self._momenta) for value in values.values()]
        agree_on(
            (self._comm,),
            "weights and momenta of the last exchange in the loaded states of an OuterOptimizer, which needs replicas "
            "that were saved after the same step",
            str((self.steps, held)),
            f"those of step {self.steps} (fingerprint {hash(tuple(held)) & 0xFFFFFFFF:08x})",
        )

    def _require_nothing_else(self, stored: Sequence[Any]) -> None:
        """Raise RuntimeError if exchanges have changed parameters that are not in `stored`."""
        known = set(map(id, stored))
        for number, param in enumerate(self._params):
            if id(param) not in known and self._momenta[id(param)].any():
                name = getattr(param, "fqn", None) or ", ".join(getattr(param, "_names", ())) or f"number {number}"
                raise RuntimeError(
                    f"parameter {name} has no state of the {type(self._optimizer).__name__} on this replica, which has "
                    "never stepped it, although other replicas have: its outer momentum cannot be stored. Take a step "
                    "with zeros as its gradient (param.grad = torch.zeros_like(param)) first"
                )

    def _require_own(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizer:
            raise ValueError(
                f"this {type(optimizer).__name__} is not the inner optimizer of this OuterOptimizer: pass the "
                "optimizer that it was constructed with"
            )


def _load_unchanged(optimizer: torch.optim.Optimizer) -> None:
    """Make `load_state_dict()` keep the dtypes of outer state; torch casts all state but "step" to parameter dtypes."""
    ours: list[tuple[Any, dict[str, Any]]] = []

    def before(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        params, numbers = (
            [param for group in groups for param in group["params"]]
            for groups in (optimizer.param_groups, state["param_groups"])
        )
        ours[:] = [
            (param, {key: value for key, value in state["state"].get(number, {}).items() if key in _KEYS})
            for param, number in zip(params, numbers, strict=False)  # torch raises an error for different lengths
        ]

    def after(optimizer: torch.optim.Optimizer) -> None:
        for param, values in ours:
            if values:
                optimizer.state[param].update(values)
        ours.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters that an optimizer may step."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    return [param for group in groups for param in group["params"] if param.is_floating_point()]


def _values(tensor: Tensor) -> Tensor:
    """Return this rank's elements as a vector ``[n]``."""
    return local_part(tensor).detach().reshape(-1)


def _require_possible(optimizer: Any, group: Any, every: int, lr: float, momentum: float, fragments: int) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, OwnedOptimizer):
        raise TypeError(
            f"fsdp.OuterOptimizer needs a torch optimizer of shards, got {type(optimizer).__name__}. (OwnedOptimizer "
            "keeps whole parameters on single ranks.)"
        )
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    if not lr > 0:
        raise ValueError(f"lr must be above 0, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be from 1 to every={every}, got {fragments}")
    if any(param.is_complex() for each in optimizer.param_groups for param in each["params"]):
        raise NotImplementedError(
            "fsdp.OuterOptimizer does not support complex parameters: use two real parameters instead"
        )
    ranks = set(ranks_of(group))
    for _, handle in _sharding(_params(optimizer)):
        shared = [comm for comm in (handle.comm, handle.replicas) if len(ranks.intersection(comm.ranks)) > 1]
        if shared:
            raise ValueError(
                f"{handle.name} is sharded or replicated over ranks {sorted(shared[0].ranks)} already, which exchange "
                f"gradients in each step, so ranks {sorted(ranks)} cannot exchange weights every few steps. Shard each "
                "replica over its own ranks, with process_group or mesh"
            )


def _sharding(params: Iterable[Any]) -> Iterator[tuple[Runtime, FlatParamHandle]]:
    """Yield the handles that contain any of these parameters, in models that have run, with their runtimes."""
    ours = set(map(id, params))
    for runtime in runtimes():
        for unit in runtime.units:
            for handle in unit.handles:
                if not ours.isdisjoint(map(id, handle.listed_params)):
                    yield runtime, handle
