"""`SameBits` makes the results of a training bitwise equal for every number of ranks.

In an ordinary training, the order of additions (of gradients, losses, squares) and the random numbers of a sample
depend on the number of ranks. Here a step consists of micro-batches that are numbered across all ranks. A single rank
computes each micro-batch with its own random numbers. Sums over micro-batches are computed in the order of their
numbers (`TreeSum`), or exactly (`exact_norm`). The engine does not depend on this module: gradients use a different
communicator (`SumByMicroBatch`), and are not divided elsewhere.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp.distributed.communicator import Communicator, during, uncompiled
from fsdp.distributed.consensus import agree_on, done_by_all, number_among, size_of, told_by_all
from fsdp.distributed.custom_collectives import InFront
from fsdp.distributed.devices import is_host
from fsdp.distributed.micro_batch_sums import MicroBatchSums, SumByMicroBatch
from fsdp.distributed.tree_sum import TreeSum
from fsdp.engine.participation import Participation
from fsdp.engine.runtime import runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.layers.exact_norm import exact_norm
from fsdp.layers.grad_clipping import reduced_gradients, scale_to, unsharded_parameters
from fsdp.layers.verify import require_sharded

_MAKE = "train with the same bits"


class SameBits:
    """Train a model with bitwise equal weights, losses and optimizer state for every number of ranks. ::

        bits = fsdp.SameBits(model, micro_batches=24, seed=0)
        for step in range(first, last):
            optimizer.zero_grad()
            losses = []
            for number in bits.step(step):  # this rank's micro-batches
                loss = model(batch(step, number)).mean()
                loss.backward()
                losses.append(loss)
            bits.clip_grad_norm_(1.0)
            optimizer.step()
            print(bits.mean(losses), fsdp.fingerprint(model, optimizer))

    A step always has the same number of micro-batches of a fixed size. With W ranks, rank r computes the micro-batches
    r, W + r, 2 W + r, ... The gradient is the mean over all micro-batches and is available after the last one; until
    then it is zero. The gradient of an unused parameter is also zero.

    The mode is permanent for this model. The constructor and all methods are collective.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        micro_batches: the number of micro-batches in a step, on all ranks together: a multiple of the number of ranks.
        seed: the seed for the random numbers of micro-batches.

    Raises:
        TypeError: if `model` is not sharded.
        ValueError: if the number of ranks does not divide the number of micro-batches.
        NotImplementedError: for features whose results depend on the number of ranks, by name: hybrid sharding,
            reductions in 16 bits, communication hooks, custom reduce-scatters, tensor parallelism, `fsdp.cond`,
            parameters that are trained and not sharded.
        RuntimeError: if arguments or numbers of threads differ between ranks; if an enclosing sharded module runs it.
    """

    def __init__(self, model: nn.Module, micro_batches: int, seed: int = 0) -> None:
        self._runtime = runtime_of_root(require_sharded(model, "fsdp.SameBits"), "fsdp.SameBits")
        self._runtime.ensure_idle(_MAKE)
        root = self._root = self._runtime.root
        done_by_all([root.everyone], _MAKE, lambda: self._require_possible(micro_batches))
        settings = f"{micro_batches} micro-batches, seed {seed}, {torch.get_num_threads()} threads"
        agree_on(root.everyone, "settings of fsdp.SameBits", settings)
        self._micro_batches, self._seed = micro_batches, seed
        self._rank, self._world_size = number_among(root.everyone), size_of(root.everyone)
        self._sums = MicroBatchSums(micro_batches)
        self._is_complete = True  # the gradients include all micro-batches of a step
        self._ranks = self._runtime.participation = _RanksWithMicroBatches()
        for each in self._runtime.units:
            each.set_divide_factors(1.0, 1.0)
            each.policy.fills_unused = True  # otherwise the layout of a gradient could differ between micro-batches
        fronts: dict[Communicator, Communicator] = {}  # shared by handles, so that small gradients are bucketed
        for handle in self._runtime.handles:
            ways = [handle.reduce_comm, handle.replicas]
            way = ways[handle.is_replicated]
            ways[handle.is_replicated] = fronts.setdefault(way, SumByMicroBatch.of(way, self._sums))
            reduce_comm, replicas = ways
            handle.connect(handle.comm, reduce_comm, replicas, replicas)
        check = weakref.WeakMethod(self._check_step)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (method := check()) is not None:
                method(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def step(self, number: int) -> Iterator[int]:
        """Collective. Yield the numbers of this rank's micro-batches of a step.

        Run a single forward and backward of the model in each iteration of the loop. Before each iteration, torch's
        generators are seeded using the seed, the step number and the micro-batch number; they are restored at the end.

        Args:
            number: the number of the step since the beginning of the training.

        Raises:
            RuntimeError: if a micro-batch had no backward, multiple backwards, or a backward under `no_sync`; inside
                `fsdp.join`, or if the model uses `fsdp.cond`.
            NotImplementedError: for norms that update running statistics in training, for example batch norms.
        """
        device = self._root.device
        done_by_all([self._root.everyone], "begin a step of fsdp.SameBits", self._require_unchanged)
        self._is_complete = False
        with torch.random.fork_rng(devices=[] if is_host(device) else [device], device_type=device.type):
            self._sums.begin()
            try:
                for micro_batch in range(self._rank, self._micro_batches, self._world_size):
                    torch.manual_seed(_mixed(self._seed, number, micro_batch))
                    yield micro_batch
                    self._require_reduced(micro_batch)
                self._is_complete = True
            finally:
                self._sums.end()

    def mean(self, losses: Iterable[Tensor | float]) -> float:
        """Collective. Return the mean of one number per micro-batch of a step, for example the loss.

        Args:
            losses: the numbers of this rank's micro-batches, in their order.

        Raises:
            ValueError: on every rank, if a rank passes more or fewer numbers than micro-batches.
            OtherRankError: with the reason, if another rank has passed another object than a number.
        """

        def numbers() -> tuple[None, list[float]]:
            return None, [loss.item() if isinstance(loss, Tensor) else float(loss) for loss in losses]

        with during("SameBits.mean()"):
            _, by_rank = told_by_all(self._root.everyone, "average its numbers", numbers)
        counts = [len(each) for each in by_rank]
        if set(counts) != {self._micro_batches // self._world_size}:
            raise ValueError(
                f"SameBits.mean() got {counts} values from the ranks, but each rank has "
                f"{self._micro_batches // self._world_size} micro-batches in a step"
            )
        total = TreeSum()
        for together in zip(*by_rank, strict=True):
            for loss in together:
                total.add(torch.tensor(loss, dtype=torch.float64, device="cpu"))
        return total.total().item() / self._micro_batches

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
        """Collective. Scale the gradients to a 2-norm of at most `max_norm`, and return the previous norm in float64.

        For up to 2**40 elements, the error of the norm is smaller than a rounding in float32; see `exact_norm`.

        Raises:
            RuntimeError: if `error_if_nonfinite` is True and the norm is not finite.
        """
        self._runtime.ensure_idle("clip gradients")
        grads = reduced_gradients(self._runtime)
        own = [grad for handle, grad in grads.items() if handle.replicas.rank == 0]  # replicated gradients count once
        with during("SameBits.clip_grad_norm_()"):
            norm = exact_norm(self._root.everyone, own, self._root.device)
        scale_to(grads.values(), norm, float(max_norm), error_if_nonfinite)
        return norm

    def _require_possible(self, micro_batches: int) -> None:
        ranks = size_of(self._root.everyone)
        if micro_batches < 1 or micro_batches % ranks:
            raise ValueError(
                f"{micro_batches} micro-batches cannot be divided among {ranks} ranks: pass a multiple of every number "
                "of ranks that you will train with (24 for 1, 2, 3, 4, 6, 8, 12 and 24)"
            )
        problems = [problem for unit in self._runtime.units for problem in _problems(unit, ranks)]
        if type(self._runtime.participation) not in (Participation, _RanksWithMicroBatches):
            problems.append("the model uses fsdp.cond or fsdp.join, with which ranks run different operations")
        apart = {id(param) for param in unsharded_parameters(self._runtime.units) if param.requires_grad}
        problems += [
            f"{name} is trained but not sharded (ignored), so each rank trains different values"
            for name, param in self._root.module.named_parameters()
            if id(param) in apart
        ]
        if problems:
            more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
            raise NotImplementedError(f"fsdp.SameBits: {problems[0]}{more}")

    def _require_unchanged(self) -> None:
        if self._runtime.participation is not self._ranks:
            raise RuntimeError(
                "fsdp.SameBits: the model has another SameBits, or uses fsdp.cond or fsdp.join, with which gradients "
                "have different numbers of summands"
            )
        for unit in self._runtime.units:
            handles = [handle for handle in unit.handles if handle.layout.numel]
            fronts = [handle.replicas if handle.is_replicated else handle.reduce_comm for handle in handles]
            is_ours = all(isinstance(front, SumByMicroBatch) and front.serves(self._sums) for front in fronts)
            is_hooked = unit.policy.comm_hook or unit.policy.all_reduce_hook
            if unit.policy.predivide * unit.policy.postdivide != 1.0 or is_hooked or not is_ours:
                raise RuntimeError(
                    f"fsdp.SameBits: the divisor, communication hook or reduce-scatter of {unit.name} was changed "
                    "after SameBits was created: do not change them"
                )
        for name, module in self._root.module.named_modules():
            # The base class of batch and instance norms is private (torch 2.11 to 2.15).
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats:
                raise NotImplementedError(
                    f"fsdp.SameBits: {name} is a {type(module).__name__} in training mode, whose running statistics "
                    "depend on this rank's batches. Call its eval(), or use a norm of single samples (LayerNorm, "
                    "GroupNorm), or track_running_stats=False."
                )

    def _require_reduced(self, micro_batch: int) -> None:
        expected, added = micro_batch - self._rank + self._world_size, self._sums.added
        if added not in ({expected}, set()) or (not added and any(one.requires_grad for one in self._runtime.handles)):
            raise RuntimeError(
                f"fsdp.SameBits: micro-batch {micro_batch} was not reduced exactly once: run one forward and one "
                "backward for each number of `bits.step(...)`, outside of no_sync(), without re-entrant checkpoints"
            )

    @uncompiled
    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        shards = {id(param) for handle in self._runtime.handles for param in handle.listed_params}
        for group in optimizer.param_groups:
            if not any(id(param) in shards for param in group["params"]):
                continue
            if not self._is_complete:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() before all {self._micro_batches} micro-batches of the step "
                    "were reduced: let the loop over `bits.step(...)` end first"
                )
            if group.get("fused") and is_host(self._root.device):
                raise NotImplementedError(
                    f"fsdp.SameBits: {type(optimizer).__name__} with fused=True rounds the last elements of a shard "
                    "differently on a CPU. Omit `fused`."
                )


class _RanksWithMicroBatches(Participation):
    """All ranks run the same operations; operations that would sum in a different order raise an error."""

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        raise RuntimeError(
            "with fsdp.SameBits clip with its method clip_grad_norm_: the bits of this norm depend on the number of "
            "ranks"
        )


def _problems(unit: Unit, ranks: int) -> Iterator[str]:
    if unit.policy.comm_hook is not None or unit.policy.all_reduce_hook is not None:
        yield f"{unit.name} has a communication hook, which sums by itself: omit it"
    if unit.placements.defers_reduction:
        yield f"{unit.name} has PARTIAL gradients, which are summed over micro-batches first: use SHARD_OPTIM_GRADS"
    for handle in unit.handles:
        own = handle.comm.world_size * handle.replicas.world_size
        if handle.is_sharded and handle.replica_axis.world_size > 1:
            yield f"{handle.name} is sharded and replicated (hybrid sharding), which sums twice: use FULL_SHARD"
        elif own != ranks and handle.layout.numel:
            yield f"{handle.name} is sharded over {own} ranks, and the model over {ranks}"
        if any(part is not None for part in handle.flat_param.parts):
            yield f"{handle.name} is tensor-parallel, which sums inside of each micro-batch"
        if handle.gradients.dtype in (torch.float16, torch.bfloat16):
            yield f"{handle.name} is reduced in {handle.gradients.dtype}: use reduce_dtype=torch.float32"
        fronts = [each for each in (handle.reduce_comm, handle.replica_axis) if isinstance(each, InFront)]
        if not all(isinstance(each, SumByMicroBatch) for each in fronts):
            yield f"{handle.name} has a custom or quantised reduce-scatter, which sums by itself: omit it"
        if not handle.unsharded.is_exact:
            yield (
                f"{handle.name} has a quantised or custom all-gather, whose bits depend on the number of ranks: omit it"
            )


def _mixed(*numbers: int) -> int:
    text = "/".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(text, digest_size=4).digest()  # torch's CPU generator uses 32 bits
    return int.from_bytes(digest, "little")
