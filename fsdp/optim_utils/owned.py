"""`OwnedOptimizer` runs optimizers that require unsharded parameters on a sharded model: each parameter has an owner.

Gradients are reduced to shards as usual. A step then sends the ranges of each owned parameter's gradient to its owner.
The owner steps the unsharded parameter with an unchanged optimizer and sends the new values of these ranges back to
the shards. The ranges follow from the layouts, so the ranks send only elements, and a byte for each range. This byte
records whether there is a gradient, and whether values have changed since the last step.

The shards are authoritative. The owner keeps a copy of the values that it steps. Values changed by operations other
than the last step (a load, `summon_full_params`, another optimizer) are sent to the owner again. If the owner holds all
elements of a parameter, it steps the shard's memory directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import Communicator, during
from fsdp.distributed.communicator import OtherRankError, own_rank, some_of
from fsdp.distributed.consensus import agree_on, done_by_all
from fsdp.distributed.dtensor import held_part, is_dtensor
from fsdp.engine.call_stack import is_called_from
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.unit import units_in
from fsdp.layers.fingerprints import block_sums
from fsdp.layers.optimizer_hooks import watch_optimizers
from fsdp.layers.optimizer_mistakes import impossible
from fsdp.layers.optimizer_states import expect_shards_of, refuse_shards_of_others, signature_of
from fsdp.layers.state_dict.full import ensure_agreed
from fsdp.layers.state_requests import require_shards
from fsdp.layers.verify import require_sharded
from fsdp.optim_utils.ownership import Cost, Owned, OwnedItem, Ownership, choose_owners, matrix_cost
from fsdp.optim_utils.params import Parameters, Place
from fsdp.optim_utils.state import (
    APART,
    OptimParam,
    Original,
    SteppedParam,
    flat_state,
    nested_state,
    options_of,
)

_OWN_KEYS = ("params", "optimizer", "sharded", "cost")
_MAKE = "make an OwnedOptimizer"
_REASON = 240  # bytes of an error message, which are sent with new values
_HAS_GRADIENT, _IS_CHANGED = 1, 2

# The element count and dtype of each tensor that a rank will send.
Sizes = list[tuple[int, torch.dtype]]


class OwnedOptimizer(torch.optim.Optimizer):
    """Step unsharded parameters of a sharded model on a single rank each, the owner, and other parameters as shards.

    Use it for optimizers that are not elementwise: Muon, Shampoo and SOAP, Adafactor, LAMB and LARS, optimizers with
    8-bit blocks. They are used unchanged, and compute the same results as on the unsharded model. ::

        def is_hidden_matrix(name, shape):
            return name.startswith("blocks.") and len(shape) == 2

        optimizer = fsdp.OwnedOptimizer(
            model,
            [
                {"params": is_hidden_matrix, "optimizer": torch.optim.Muon, "lr": 0.02},
                {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 3e-4},
            ],
        )

    The constructor and `step` are collective. `param_groups` contain the parameters that the sharded model lists, and
    the options of each group's optimizer, for learning-rate schedulers, scalers and clipping. Keys of `state` are the
    tensors that are stepped on this rank: unsharded parameters and shards. `state_dict()` returns this rank's state;
    `fsdp.save` and `fsdp.optim_utils.full_optim_state_dict` save the state of all ranks.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        groups: a dictionary for each group of parameters. ``optimizer`` is a class of optimizers, or a function that
            creates an optimizer from a list of parameters. ``params`` are names of parameters in the unsharded module,
            parameters of the sharded model, or a function. The function receives a name and the unsharded shape, and
            returns whether the parameter belongs to the group. By default, ``params`` are all parameters that are in
            no other group. ``sharded`` is True if the optimizer is elementwise and steps the shards in place. ``cost``
            is a function that returns the cost of a parameter's step from its shape, in any unit, to assign owners (by
            default the cost to orthogonalize a matrix; use `math.prod` for optimizers that are linear in the number of
            elements). All other keys are options of the optimizer. If ``optimizer`` is None, another optimizer steps
            the parameters of the group, for example `DTensor`s that this class does not support.

    Attributes:
        plan: the owner of each parameter; ``print(optimizer.plan)`` shows a table with costs, elements and bytes.
        optimizers: the optimizers of the groups on this rank, which step the keys of `state`.

    Raises:
        TypeError: for an unsharded model, and for functions that do not return an optimizer.
        ValueError: for parameters in two groups, in none, or of another model; if a group divides a flat parameter.
        NotImplementedError: for tensor-parallel parameters and shards on disk in a group with an optimizer, and for
            optimizers that require a closure.
        RuntimeError: inside a forward, backward or `summon_full_params`; on every rank, if ranks have different groups.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
        watch_optimizers()
        root = require_sharded(model, "OwnedOptimizer")
        root.require_idle(_MAKE)
        ensure_agreed(root)

        def read() -> None:
            require_shards(units_in(root), _MAKE)
            given = _checked_groups(groups)
            places = _places_of_groups(Parameters(model, root), given)
            kept = [number for number, group in enumerate(given) if group["optimizer"] is not None]
            given, places = [given[number] for number in kept], [places[number] for number in kept]
            for place in (place for members in places for place in members):
                _refuse_unsupported(*place)
            self.plan, owners = _plan(kept, given, places)
            self._members = [[_Member(*place, owners.get(place)) for place in members] for members in places]
            self.optimizers = [_made(*one) for one in zip(kept, given, self._members, strict=True)]

        done_by_all([root.everyone], _MAKE, read)
        self._by_key = {one.key: one for one in self._each()}
        listed = [list(dict.fromkeys(one.listed.param for one in members)) for members in self._members]
        options = [options_of(optimizer.param_groups[0]) for optimizer in self.optimizers]
        super().__init__([{**o, "params": params} for o, params in zip(options, listed, strict=True)], {})
        # Schedulers that cycle momentum look up the option's name in the defaults, and set the option in all groups.
        common = set.intersection(*map(set, options))
        self.defaults = {key: value for key, value in options[0].items() if key in common}
        here = {one.stepped.param for one in self._each() if one.stepped.is_here}
        for optimizer in self.optimizers:  # all use one dictionary, so that `state` contains the state of all groups
            self.state.update({param: state for param, state in optimizer.state.items() if param in here})
            optimizer.state = self.state
        travelling: dict[Communicator, list[_Member]] = {}
        for member in self._each():
            if member.travels:
                travelling.setdefault(member.listed.comm, []).append(member)
        self._exchanges = [_Exchange(members) for members in travelling.values()]
        agree_on(root.everyone, "groups in an OwnedOptimizer", self._described())

    def _each(self) -> Iterator[_Member]:
        return (member for members in self._members for member in members)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise NotImplementedError after construction, because owners are chosen for all groups together."""
        if len(self.param_groups) == len(self.optimizers):
            raise NotImplementedError(
                "groups cannot be added to an OwnedOptimizer, because owners are chosen for all groups together. "
                "Create another optimizer with all groups, and load this optimizer's state into it "
                "(fsdp.optim_utils.full_optim_state_dict, load_full_optim_state_dict)."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> Any:
        """Raise NotImplementedError: `copy.deepcopy` and `pickle` would separate the optimizer from the model."""
        raise NotImplementedError(
            "an OwnedOptimizer cannot be copied or pickled, because it belongs to the shards of its model. Make "
            "another OwnedOptimizer of the copied model with the same groups, and load copy.deepcopy(state_dict()) on "
            "each rank; or save it with fsdp.save."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Step all parameters with a gradient on any rank.

        Args:
            closure: a function that computes gradients and returns the loss; called once, before the step.

        Returns:
            The return value of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._call(lambda optimizer: optimizer.step(), with_gradients=True)
        return loss

    def train(self, mode: bool = True) -> None:
        """Collective. Call ``train()``, or ``eval()`` if `mode` is False, of optimizers with these methods.

        Schedule-free optimizers change parameters in these methods.
        """
        name = "train" if mode else "eval"
        self._call(lambda optimizer: getattr(optimizer, name, lambda: None)(), with_gradients=False)

    def eval(self) -> None:
        """Collective. Call ``eval()`` of the groups' optimizers with this method."""
        self.train(False)

    @torch.no_grad()
    @during("OwnedOptimizer.step()")  # not on `step`: in `fsdp.join` hooks communicate with ranks that do not call it
    def _call(self, call: Callable[[torch.optim.Optimizer], Any], with_gradients: bool) -> None:
        """Call a method of each group's optimizer, and copy the new values to the shards."""
        arriving = [exchange.collect(with_gradients) for exchange in self._exchanges]
        failure: Exception | None = None
        try:
            for number, members in sorted(enumerate(self._members), key=lambda group: group[1][0].stepped.is_owned):
                if members[0].stepped.is_owned:  # shards were stepped during the transfers
                    for arrive in arriving:
                        arrive()
                    arriving = []
                for member in members:
                    if not member.travels:
                        member.show(with_gradients)
                if failure is None:
                    failure = self._with_options(number, call)
            failed = [each for exchange in self._exchanges for each in exchange.deliver(failure)]
        finally:
            for member in self._each():
                member.stepped.param.grad = None
        if failure is not None:
            raise failure
        for rank, reason in failed:
            raise OtherRankError(
                f"rank {own_rank()}: rank {rank} has raised an error in the step of the parameters that it owns, so "
                f"these were not updated. {reason}"
            )

    def _with_options(self, number: int, call: Callable[[torch.optim.Optimizer], Any]) -> Exception | None:
        """Return an exception instead of raising it: the other ranks wait for new values and must be informed."""
        optimizer, shown = self.optimizers[number], self.param_groups[number]
        (own,) = optimizer.param_groups
        own.update(options_of(shown))
        try:
            call(optimizer)
        except Exception as error:  # noqa: BLE001 (raised after the other ranks were informed)
            return error
        shown.update(options_of(own))  # some optimizers keep counters in their options
        return None

    def _described(self) -> str:
        groups = [
            f"{type(optimizer).__name__} of {', '.join(f'{one.name} by {one.stepped.owner}' for one in members)}"
            for optimizer, members in zip(self.optimizers, self._members, strict=True)
        ]
        return "; ".join(groups)

    @property
    def stepped_groups(self) -> list[dict[str, Any]]:
        """The parameter groups with the stepped parameters; functions that save and load state use them."""
        return [
            {**options_of(group), "params": [one.stepped.param for one in members]}
            for group, members in zip(self.param_groups, self._members, strict=True)
        ]

    def stepped_in(self, handle: FlatParamHandle | None, slot: int, param: Any) -> SteppedParam | None:
        """Return the stepped parameter of an original parameter; None if the original is in no group."""
        key = id(param) if handle is None else (handle, slot)
        member = self._by_key.get(key)
        return None if member is None else member.stepped

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's owned parameters and shards, which must be loaded on the same rank.

        Parameters are numbered as unsharded parameters of all groups, equally on every rank.

        Raises:
            NotImplementedError: if `torch.distributed.checkpoint.state_dict` calls it, because the state on other
                owners would be omitted.
        """
        _refuse_torchs_functions()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        numbers = {one: number for number, one in enumerate(self._each())}
        held = {n: one for one, n in numbers.items() if one.stepped.is_here and self.state.get(one.stepped.param)}
        found = {
            "state": {number: flat_state(self.state[one.stepped.param]) for number, one in held.items()},
            "param_groups": [
                {**options_of(group), "params": [numbers[one] for one in members]}
                for group, members in zip(self.param_groups, self._members, strict=True)
            ],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's `state_dict`, with the same number of ranks, or this rank's shard of a full state.

        Tensors are moved to the parameters' device, and not copied otherwise.

        Raises:
            NotImplementedError: if `torch.distributed.checkpoint.state_dict` calls it.
            ValueError: for different groups, and for state of other ranks' parameters.
            RuntimeError: for another rank's state.
        """
        _refuse_torchs_functions()
        state_dict = dict(state_dict)  # hooks may change it in place
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved, members = state_dict["param_groups"], list(self._each())
        sizes = [len(group["params"]) for group in saved]
        if sizes != list(map(len, self._members)):
            raise ValueError(
                f"OwnedOptimizer.load_state_dict: the state has groups of {sizes} parameters, but this optimizer has "
                f"groups of {list(map(len, self._members))} unsharded parameters. {_FULL}"
            )
        order = [number for group in saved for number in group["params"]]
        states = {member: state_dict["state"].get(number) for number, member in zip(order, members, strict=True)}
        for member, state in states.items():
            tensors = [each for each in (state or {}).values() if isinstance(each, Tensor) and each.dim()]
            if not member.stepped.is_here and any(each.numel() for each in tensors):
                raise ValueError(
                    f"OwnedOptimizer.load_state_dict: the state has values of {member.name}, which another rank "
                    f"owns (rank {member.stepped.owner} of the ranks that share it): the state belongs to another rank "
                    f"or to a model with other wrappers, or consists of shards that no owner can use. {_FULL}"
                )
        signature = signature_of(state_dict)
        refuse_shards_of_others(self, signature)
        expect_shards_of(self, signature)
        for group, own in zip(saved, self.param_groups, strict=True):
            own.update(options_of(group))
        self.state.clear()
        for member, state in states.items():
            if member.stepped.is_here and state:
                self.state[member.stepped.param] = nested_state(
                    {key: _beside(value, member.stepped.param) for key, value in state.items()}
                )
        for optimizer, group in zip(self.optimizers, saved, strict=True):
            (own,) = optimizer.param_groups
            own.update(options_of(group))
            # As in torch's `load_state_dict`: converts FairScale's numbers to tensors, and adds options of newer torch.
            optimizer.__setstate__({"state": self.state, "param_groups": [own]})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


_FULL = (
    "Save all of the state with fsdp.save, or fsdp.optim_utils.full_optim_state_dict(model, optimizer), and load it "
    "with fsdp.load, or load_full_optim_state_dict(model, optimizer, full)."
)


def _refuse_torchs_functions() -> None:
    """Raise NotImplementedError if `get_optimizer_state_dict` or a similar torch function calls a state method.

    These functions name parameters by the optimizer's list, and gather `DTensor`s, so they would silently omit the
    state of parameters that other ranks own. On a rank without owned parameters, only the call stack shows such a
    function.
    """
    if is_called_from("torch.distributed.checkpoint.state_dict"):
        raise NotImplementedError(f"torch.distributed.checkpoint.state_dict does not support state of owners. {_FULL}")


def _beside(value: Any, param: Tensor) -> Any:
    """Move a tensor of the state to the parameter's device; 0-d tensors are not moved, as in torch."""
    return value.to(param.device) if isinstance(value, Tensor) and value.dim() else value


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a plain tensor that shares the memory."""
    return (held_part(tensor) if is_dtensor(tensor) else tensor).detach().as_subclass(Tensor)


class _Member:
    """An original parameter in a group, with the listed parameter and the stepped tensor.

    `owner` is the owner's number among the ranks that share the parameter; None if each rank steps its own elements.
    """

    def __init__(self, listed: OptimParam, original: Original, owner: int | None) -> None:
        self.listed, self.original, self.name = listed, original, original.name
        self.key: Any = id(listed.param) if listed.handle is None else (listed.handle, original.slot)
        self.interval = listed.interval(original, listed.comm.rank)
        comm = listed.comm
        is_here = owner in (None, comm.rank)
        self.held = _held(listed, original)
        # Whether ranks other than the owner have elements.
        self.travels = owner is not None and self.held[owner] < original.shape.numel()
        like = listed.param
        if owner is None:
            made = self.elements
        elif self.travels:
            held = original.shape if like.requires_grad else ()  # a frozen parameter gets memory if it is trained later
            made = torch.empty(held, dtype=like.dtype, device=like.device if is_here else "meta").expand(original.shape)
        else:
            made = self.elements.view(original.shape) if is_here else torch.empty(original.shape, device="meta")
        stepped = nn.Parameter(made.to(like.dtype), requires_grad=like.requires_grad)
        self.stepped = SteppedParam(stepped, listed.handle, (original,), owner=owner)
        self._known: tuple[Any, Tensor] | None = None  # dtype, device and block sums of the elements that the owner has

    @property
    def elements(self) -> Tensor:
        """This rank's elements in the memory of the listed parameter, as a vector."""
        return self._of(_local(self.listed.param))

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of these elements, in `grad_dtype`; None if there is no gradient."""
        grad = self.listed.param.grad
        return None if grad is None else self._of(_local(grad).contiguous()).to(self.grad_dtype)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of the gradient for the optimizer: the parameter's dtype, or a wider dtype of the gradient."""
        param = self.listed.param
        return torch.promote_types(param.dtype, param.grad_dtype or param.dtype)

    def _of(self, local: Tensor) -> Tensor:
        flat, kept = local.view(-1), self.interval
        return flat[:0] if kept is None else flat[kept.offset : kept.offset + kept.numel]

    def show(self, with_gradient: bool) -> None:
        """Make the stepped tensor and its gradient use the memory of the shard."""
        param = self.stepped.param
        if self.stepped.is_here:
            elements, gradient = self.elements, self.gradient if with_gradient else None
            param.data = elements.view(param.shape)
            if gradient is not None:
                param.grad_dtype = gradient.dtype
            param.grad = None if gradient is None else gradient.view(param.shape)

    def part(self, unsharded: Tensor, rank: int) -> Tensor:
        """Return the elements of a rank, as a view of a tensor with the unsharded shape."""
        handle, slot = self.listed.handle, self.original.slot
        layout = None if handle is None else handle.layout
        if isinstance(layout, RowsLayout) and unsharded.dim():
            first, last = layout.rows(slot, rank)
            return unsharded.narrow(layout.slots[slot].dim, first, last - first)
        kept = self.listed.interval(self.original, rank)
        return unsharded.view(-1)[kept.start : kept.stop] if kept is not None else unsharded.view(-1)[:0]

    def put(self, unsharded: Tensor, rank: int, elements: Tensor) -> None:
        place = self.part(unsharded, rank)
        place.copy_(elements.view(place.shape))

    def note_values(self) -> None:
        """Record that the owner's values are equal to the shard's."""
        elements = self.elements
        self._known = (elements.dtype, elements.device), block_sums(elements)

    def forget_values(self) -> None:
        """Record that the owner's values will change; if the step fails, the next step sends the shard's values."""
        self._known = None

    @property
    def differs(self) -> Tensor:
        """A bool tensor ``[]``: whether the owner has other values, another dtype or device, or no values."""
        elements = self.elements
        if self._known is None or self._known[0] != (elements.dtype, elements.device):
            return torch.ones((), dtype=torch.bool, device="cpu")
        return (block_sums(elements) != self._known[1]).any()


class _Exchange:
    """Exchanges gradients and values between the owners of some parameters and the ranks that share them."""

    def __init__(self, members: Sequence[_Member]) -> None:
        self._members, self._comm = members, members[0].listed.comm
        self._taking_part: list[_Member] = []  # in the current step
        self._to_owners: dict[int, list[_Member]] = {}  # by owner, parameters of which this rank has elements
        self._from_holders: dict[int, list[_Member]] = {}  # by rank with elements, parameters that this rank owns

    def collect(self, with_gradients: bool) -> Callable[[], None]:
        """Start sending data to owners; the returned function waits, and passes the data to the optimizers."""
        self._taking_part = [one for one in self._members if one.listed.param.requires_grad]
        self._to_owners, self._from_holders, changed = {}, {}, self._changed()
        for one in self._taking_part:
            one.forget_values()
            if one.interval is not None and one.stepped.owner is not None and not one.stepped.is_here:
                self._to_owners.setdefault(one.stepped.owner, []).append(one)
            for rank, numel in enumerate(one.held) if one.stepped.is_here else ():
                if numel and rank != self._comm.rank:
                    self._from_holders.setdefault(rank, []).append(one)
        signs = {
            one: _HAS_GRADIENT * (with_gradients and one.listed.param.grad is not None) + _IS_CHANGED * (one in changed)
            for one in self._taking_part
        }
        outgoing, sizes = {}, {}
        for owner, held in self._to_owners.items():
            told = torch.tensor([signs[one] for one in held], dtype=torch.uint8, device="cpu")
            outgoing[owner] = [told, *(_or_zeros(one) for one in held if with_gradients)]
        for rank, own in self._from_holders.items():
            grads = [(one.held[rank], one.grad_dtype) for one in own if with_gradients]
            sizes[rank] = [(len(own), torch.uint8), *grads]
        return partial(self._show, with_gradients, signs, self._send("gradients", outgoing, sizes))

    def _changed(self) -> set[_Member]:
        """Return the members whose shards were changed since the last step."""
        if not self._taking_part:
            return set()
        device = self._taking_part[0].listed.device
        differ = torch.stack([one.differs.to(device) for one in self._taking_part])  # a single wait of the host
        return set(compress(self._taking_part, differ.tolist()))

    def _show(
        self, with_gradients: bool, signs: Mapping[_Member, int], arrive: Callable[[], dict[int, list[Tensor]]]
    ) -> None:
        rank, found = self._comm.rank, arrive()
        told = {
            holder: dict(zip(own, found[holder][0].tolist(), strict=True)) for holder, own in self._from_holders.items()
        }
        for one in self._taking_part:
            if one.stepped.is_here:
                param, listed = one.stepped.param, one.listed.param
                is_alike = (param.dtype, param.device) == (listed.dtype, listed.device)  # users may cast and move it
                if not (is_alike and param.is_contiguous()):
                    param.data = torch.empty(param.shape, dtype=listed.dtype, device=listed.device)
                every = [signs[one], *(each.get(one, 0) for each in told.values())]
                if any(sign & _HAS_GRADIENT for sign in every):
                    param.grad_dtype = one.grad_dtype
                    param.grad = torch.empty_like(param, dtype=one.grad_dtype)
                    if one.interval is not None:
                        one.put(param.grad, rank, _or_zeros(one))
                if signs[one] & _IS_CHANGED and one.interval is not None:
                    one.put(param.data, rank, one.elements)
        for holder, own in self._from_holders.items() if with_gradients else ():
            for one, elements in zip(own, found[holder][1:], strict=True):
                if one.stepped.param.grad is not None:
                    one.put(one.stepped.param.grad, holder, elements)
        self._renew(signs, told)

    def _renew(self, signs: Mapping[_Member, int], told: Mapping[int, Mapping[_Member, int]]) -> None:
        """Send changed values to owners. Every rank knows from the exchanged bytes what it sends and receives."""
        outgoing = {
            owner: [one.elements for one in held if signs[one] & _IS_CHANGED] for owner, held in self._to_owners.items()
        }
        changed = {holder: [one for one, sign in each.items() if sign & _IS_CHANGED] for holder, each in told.items()}
        sizes = {holder: [(one.held[holder], one.listed.param.dtype) for one in own] for holder, own in changed.items()}
        found = self._send("values", outgoing, sizes)()
        for holder, own in changed.items():
            for one, elements in zip(own, found.get(holder, ()), strict=True):
                one.put(one.stepped.param.data, holder, elements)

    def deliver(self, failure: Exception | None) -> list[tuple[int, str]]:
        """Send new values back and write them to the shards, unless the step on this rank was a `failure`.

        Return the failed ranks, among the owners of this rank's elements, with the texts of their errors.
        """
        comm, to_owners = self._comm, self._to_owners
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        told = torch.frombuffer(bytearray(text.encode()[:_REASON].ljust(_REASON, b"\0")), dtype=torch.uint8)
        outgoing = {
            rank: [told, *(one.part(one.stepped.param.detach(), rank).reshape(-1) for one in own)]
            for rank, own in self._from_holders.items()
        }
        sizes = {
            owner: [(_REASON, torch.uint8), *((one.elements.numel(), one.listed.param.dtype) for one in held)]
            for owner, held in to_owners.items()
        }
        arrive = self._send("new values", outgoing, sizes)
        for one in self._taking_part:
            if one.stepped.is_here and one.interval is not None and failure is None:
                one.elements.copy_(one.part(one.stepped.param.detach(), comm.rank).reshape(-1))
        found = arrive()
        texts = {owner: bytes(found[owner][0].tolist()).rstrip(b"\0").decode(errors="ignore") for owner in to_owners}
        failed = {owner: reason for owner, reason in texts.items() if reason}
        for owner, held in to_owners.items():
            if owner not in failed:
                for one, elements in zip(held, found[owner][1:], strict=True):
                    one.elements.copy_(elements)
        for one in self._taking_part:
            if one.stepped.owner not in failed and (failure is None or not one.stepped.is_here):
                one.note_values()
        comm.settle()
        for handle in {one.listed.handle for one in self._taking_part}:
            if handle is not None:  # even without a write on this rank, so that all ranks all-gather again
                handle.values.touch()
        return [(comm.ranks[owner], reason) for owner, reason in failed.items()]

    def _send(
        self, what: str, outgoing: Mapping[int, Sequence[Tensor]], sizes: Mapping[int, Sizes]
    ) -> Callable[[], dict[int, list[Tensor]]]:
        """Start sending vectors to ranks; the returned function returns the received vectors of the given `sizes`.

        Vectors of the same dtype are sent in a single message.
        """
        first = self._members[0].listed
        sent: dict[int, list[Tensor]] = {}
        for rank, vectors in outgoing.items():
            for dtype in dict.fromkeys(each.dtype for each in vectors):
                own = [each.to(first.device) for each in vectors if each.dtype == dtype]
                sent.setdefault(rank, []).append(torch.cat(own))
        room: dict[int, list[Tensor]] = {}
        found: dict[int, list[Tensor]] = {}
        for rank, awaited in sizes.items():
            parts: dict[torch.dtype, Iterator[Tensor]] = {}
            for dtype in dict.fromkeys(each for _, each in awaited):
                numels = [numel for numel, each in awaited if each == dtype]
                room.setdefault(rank, []).append(torch.empty(sum(numels), dtype=dtype, device=first.device))
                parts[dtype] = iter(room[rank][-1].split(numels))
            found[rank] = [next(parts[dtype]) for _, dtype in awaited]
        pending = self._comm.exchange(room, sent, f"{what} of owned parameters", ("owned", what, first.tag))

        def arrived() -> dict[int, list[Tensor]]:
            pending.wait()
            return found

        return arrived


def _held(one: OptimParam, original: Original) -> tuple[int, ...]:
    """Return the number of elements of a parameter on each rank that shares the parameter."""
    intervals = [one.interval(original, rank) for rank in range(one.comm.world_size)]
    return tuple(0 if each is None else each.numel for each in intervals)


def _or_zeros(one: _Member) -> Tensor:
    """Return this rank's elements of a gradient; zeros if only other ranks have a gradient."""
    gradient = one.gradient
    return torch.zeros_like(one.elements, dtype=one.grad_dtype) if gradient is None else gradient


def _checked_groups(groups: Any) -> list[dict[str, Any]]:
    given = list(groups) if isinstance(groups, Iterable) and not isinstance(groups, (str, Mapping)) else []
    if not given or not all(isinstance(group, Mapping) for group in given):
        raise TypeError(
            "groups is a list of dictionaries such as {'params': ..., 'optimizer': torch.optim.Muon, 'lr': 0.02}; got "
            f"{groups!r:.100}"
        )
    for number, group in enumerate(given):
        make = group.get("optimizer", group)
        if make is None and group.keys() == {"params", "optimizer"}:
            continue  # another optimizer steps this group
        if not callable(make):
            raise TypeError(
                f"group {number} needs under 'optimizer' a class of optimizers, or a function that creates an "
                "optimizer from a list of parameters (or None, with nothing but 'params', for parameters that another "
                f"optimizer steps); got {group.get('optimizer')!r}"
            )
        step = getattr(make, "step", None)
        closure = None if step is None else inspect.signature(inspect.unwrap(step)).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise NotImplementedError(
                f"{make.__name__}.step() needs a closure, which it may call many times to search over all parameters "
                "together: this search cannot be divided among owners. Use it on an unsharded model."
            )
        if reason := impossible(getattr(make, "__name__", "")):
            raise NotImplementedError(f"{make.__name__} {reason}. Use it on an unsharded model.")
    if all(group["optimizer"] is None for group in given):
        raise ValueError("no group has an optimizer: an OwnedOptimizer would step no parameter")
    if sum("params" not in group for group in given) > 1:
        raise ValueError(
            "only one group may omit 'params' (it gets all parameters that are in no other group), but several do"
        )
    return [dict(group) for group in given]


def _places_of_groups(params: Parameters, given: Sequence[Mapping[str, Any]]) -> list[list[Place]]:
    every = list(params.by_number.values())
    group_of: dict[Place, int] = {}
    for number, group in enumerate(given):
        for place in _chosen(params, every, number, group["params"]) if "params" in group else ():
            if group_of.setdefault(place, number) != number:
                raise ValueError(f"{place[1].name} is in groups {group_of[place]} and {number}: keep it in only one")
    rest = next((number for number, group in enumerate(given) if "params" not in group), None)
    left = [place for place in every if place not in group_of]
    if rest is not None:
        group_of |= dict.fromkeys(left, rest)
    elif unwanted := [original.name for one, original in left if one.param.requires_grad]:
        raise ValueError(
            f"no group has {some_of(unwanted)}: omit 'params' in the group for all other parameters, or freeze "
            "parameters that are not trained (requires_grad_(False))"
        )
    for one, original in every:
        first = one.originals[0]
        numbers = group_of.get((one, first)), group_of.get((one, original))
        if numbers[0] != numbers[1]:
            where = ["in no group" if number is None else f"in group {number}" for number in numbers]
            raise ValueError(
                f"{first.name} is {where[0]} and {original.name} {where[1]}; the two are in one flat parameter. "
                f"{APART} Or pass group_by, so that each group has separate flat parameters."
            )
    found = [[place for place in every if group_of.get(place) == number] for number in range(len(given))]
    for number, members in enumerate(found):
        if not members:
            raise ValueError(f"group {number} of the OwnedOptimizer has no parameters")
    return found


def _chosen(params: Parameters, every: Sequence[Place], number: int, chosen: Any) -> list[Place]:
    if callable(chosen):
        return [place for place in every if chosen(place[1].name, place[1].shape)]
    found = []
    for each in [chosen] if isinstance(chosen, (str, Tensor)) else chosen:
        if isinstance(each, str):
            place = params.named(each)
            if place is None:
                raise ValueError(
                    f"group {number} has a parameter {each!r}, but the model has no parameter of this name. Names must "
                    "be names of the unsharded module."
                )
            found.append(place)
        else:
            one = params.of(each)
            if one is None:
                raise ValueError(
                    f"group {number} has a parameter of shape {tuple(getattr(each, 'shape', ()))} that is not of this "
                    "model as it is sharded now. Pass names of the unsharded module's parameters, or parameters() of "
                    "the sharded model."
                )
            found += [(one, original) for original in one.originals]
    return found


def _refuse_unsupported(one: OptimParam, original: Original) -> None:
    handle = one.handle
    if original.part is not None or (handle is None and is_dtensor(one.param)):
        raise NotImplementedError(
            f"{original.name} is a DTensor already (tensor parallelism): an OwnedOptimizer steps whole parameters that "
            "are sharded over data-parallel ranks only. Step it with an optimizer of DTensors, and pass "
            "{'params': ..., 'optimizer': None} for it here."
        )
    if one.param.is_meta:
        raise RuntimeError(
            f"{original.name} has no values yet: create the OwnedOptimizer after fsdp.materialize, or after to_empty() "
            "and a load"
        )
    if handle is None and not one.param.is_contiguous():
        raise NotImplementedError(
            f"{original.name} is ignored and not contiguous (channels_last, or transposed), and an OwnedOptimizer "
            "steps contiguous memory. Write param.data = param.data.contiguous() before, or step it with another "
            "optimizer, and pass {'params': ..., 'optimizer': None} for it here."
        )
    if handle is not None and handle.storage.files is not None:
        raise NotImplementedError(
            f"the shard of {original.name} is on disk, but an OwnedOptimizer does not support state on disk. Offload "
            "to the host (cpu_offload) instead, or use torch's AdamW without OwnedOptimizer."
        )
    if handle is not None and handle.flat_param.examples[original.slot] is not None:
        raise NotImplementedError(
            f"{original.name} is of a tensor class with an all-gather extension, whose values an OwnedOptimizer does "
            "not know. Use an elementwise optimizer without OwnedOptimizer."
        )


def _plan(
    numbers: Sequence[int], given: Sequence[Mapping[str, Any]], places: Sequence[Sequence[Place]]
) -> tuple[Ownership, dict[Place, int]]:
    """Return the plan, and the owner of each owned parameter, of groups with these numbers."""
    by_comm: dict[Communicator, list[tuple[Place, OwnedItem]]] = {}
    sharded: list[str] = []
    for number, group, members in zip(numbers, given, places, strict=True):
        cost: Cost = group.get("cost") or matrix_cost
        for one, original in members:
            if group.get("sharded"):
                sharded.append(original.name)
                continue
            costs = float(cost(original.shape))
            if not 0 <= costs < float("inf"):
                raise ValueError(f"the cost of {original.name} in group {number} is {costs}: a finite number is needed")
            held = _held(one, original)
            item = OwnedItem(original.name, original.shape, costs, held, one.param.dtype.itemsize)
            by_comm.setdefault(one.comm, []).append(((one, original), item))
    owned: list[Owned] = []
    owners: dict[Place, int] = {}
    for comm, each in by_comm.items():
        chosen = choose_owners([item for _, item in each], tuple(comm.ranks))
        owners |= {place: one.owner for (place, _), one in zip(each, chosen, strict=True)}
        owned += chosen
    return Ownership(owned, sharded), owners


def _made(number: int, group: Mapping[str, Any], members: Sequence[_Member]) -> torch.optim.Optimizer:
    """Create the optimizer of a group, which contains all parameters of the group on every rank."""
    options = {key: value for key, value in group.items() if key not in _OWN_KEYS}
    optimizer = group["optimizer"]([one.stepped.param for one in members], **options)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(optimizer.param_groups) != 1:
        raise TypeError(
            f"the 'optimizer' of group {number} returned a {type(optimizer).__name__}, but must return a "
            "torch.optim.Optimizer with one parameter group"
        )
    return optimizer
