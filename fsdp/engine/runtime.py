"""The runtime of a root unshards, reshards and reduces all units, driven by the units' hooks.

===========================  ====================================  ===================================================
event (method)               state of the unit                     actions
===========================  ====================================  ===================================================
forward begins               IDLE -> FORWARD                       unshard the unit, start the all-gather of the next
(`before_forward`)                                                 expected unit, wait, list unsharded parameters
forward ends                 FORWARD -> IDLE                       merge values written to weights; reshard, unless
(`after_forward`)                                                  backward follows at once or the user keeps the unit
backward reaches its         IDLE, BACKWARD_POST -> BACKWARD_PRE   unshard, prefetch in the order of the last
outputs (`before_backward`)                                        backward, wait, list unsharded parameters
a handle has all gradients   BACKWARD_PRE -> BACKWARD_POST         reshard, start the reduction, which ends when the
(`gradient_complete`)                                              next reduction has started, or with the backward
backward has passed a call   (the same)                            reshard units with frozen parameters
(`passed`)
backward ends                BACKWARD_POST -> IDLE                 reduce incomplete gradients (unused parameters),
(`finish_backward`)                                                finish reductions, show gradients, list shards
===========================  ====================================  ===================================================

A recomputed forward (activation checkpointing) is a part of a backward and unshards as backward does. If a backward
runs during a forward, units whose forward is running stay in FORWARD and keep their parameters.

Memory therefore contains the shards, the computing units, one prefetched unit and two reductions at most. Small units
are prefetched in buckets (`schedule`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fsdp.distributed.communicator import CollectiveError, Communicator, uncompiled
from fsdp.distributed.devices import copy_stream_of
from fsdp.distributed.passes import Passes
from fsdp.engine.autograd import BackwardPass, FollowedPass, in_backward, retains_graph
from fsdp.engine.forward_hooks import Call, called_by_two_threads, threads_in
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.phase import Phase
from fsdp.engine.reduction import SMALL_BYTES, Reductions
from fsdp.engine.schedule import NOTHING, ExecutionOrder, gathered_nbytes, unshard_together
from fsdp.engine.unit import NO_MODULES, ModuleGroup, TrainingState, Unit, changed_before_backward, units_in
from fsdp.engine.usage import Usage

if TYPE_CHECKING:
    from fsdp.engine.checks import Checks
    from fsdp.engine.participation import Participation


class Runtime:
    """Schedules all units of a module tree.

    Args:
        root: the outermost unit.
        units: the units of the tree, numbered the same on all ranks, with the names of their modules.

    Raises:
        RuntimeError: if an inner unit has already run as a root.
    """

    # Layers, attached by the function that creates the runtime.
    checks: Checks  # of the tree
    steps: Any  # of the optimizers, compared between ranks (`Steps`)
    participation: Participation  # of the ranks, which may run different modules

    def __init__(self, root: Unit, units: Mapping[Unit, str]) -> None:
        self.root = root
        self.units = list(units)
        self.passes = Passes()
        self._adopt(units)
        mixed = [unit for unit in self.units if unit.precision.is_mixed]
        self.inside_mixed = {inner for unit in mixed for inner in units_in(unit) if inner is not unit}
        self.has_run = False  # a forward began under this root
        self._reductions = Reductions(root.policy.bucket_bytes)
        self._small_bytes = min(SMALL_BYTES, root.policy.bucket_bytes)  # the limit for units gathered together
        self._usage = Usage()
        self._forward_order, self._backward_order = self.new_order(), self.new_order()
        self._waiting: list[Unit] = []  # with complete gradients, while backward still reads the parameters
        self._left: list[FlatParamHandle] = []  # left unsharded by the last forward; no backward ran since
        self._groups = [unit for unit in self.units if isinstance(unit.module, ModuleGroup)]
        self._outermost = root  # the unit whose forward the user called last
        self._running: list[Call] = []  # running forwards, the innermost last
        self._backward: BackwardPass | FollowedPass | None = None  # running, or failed
        self._leaves_graph = False  # its graph is kept (create_graph=True) and needs unsharded parameters
        self.handles = [handle for unit in self.units for handle in unit.handles]
        self._reads_ahead = not all(handle.storage.is_resident for handle in self.handles)
        self._kept = [handle for handle in self.handles if handle.kept_shard is not None]
        self._deferring = [unit for unit in self.units if unit.placements.defers_reduction]
        self.keeps_parameters = any(unit.placements.keeps_parameters for unit in self.units)  # across steps
        # Whether any gradient ever arrived; None before the first forward that needs a backward.
        self.has_trained: bool | None = None
        self.has_deferred = False  # a backward left gradients with PARTIAL placements unreduced
        _all.add(self)

    def _adopt(self, units: Mapping[Unit, str]) -> None:
        """Take over all units of the tree.

        Raises:
            RuntimeError: if a unit has run as a root, or is in the middle of a forward or backward.
        """
        kind = type(self.root.module).__name__
        for unit, name in units.items():
            before = unit.runtime
            if before is not None and before.root is unit is not self.root and before.has_run:
                raise RuntimeError(
                    f"a second root: unit '{name}' was called on its own before the {kind} around it, and became a "
                    "root itself. Call the outermost unit first. (FullyShardedDataParallel has `_reset_lazy_init()` "
                    "for this, to be called on the inner one before the outer one is used.)"
                )
            if before is not None:
                before.ensure_idle(f"become part of another {kind}")
        for unit, name in units.items():
            unit.runtime = self
            unit.rename(name)
            for handle in unit.handles:
                handle.passes = self.passes

    def before_forward(self, unit: Unit, inputs: Any) -> None:
        """Hook: `unit` is about to compute."""
        if unit.unfinished_load is not None:
            unit.end_load()
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{unit.name}: forward inside summon_full_params() works for inference only, because gradients "
                    "would go to the summoned copies and be lost. Use torch.no_grad(), or leave the context first."
                )
            return
        call = Call(unit, recomputed=self._backward is not None and self.is_in_backward and in_backward())
        is_outermost = not call.recomputed and (not self._running or unit is self.root)
        if is_outermost:
            self._begin_forward(unit)
            if unit.runtime is not self:  # the checks have found that the tree's units have changed
                unit.ensure_runtime().before_forward(unit, inputs)
                return
        self._running.append(call)
        if is_outermost:
            self.passes.begin_forward(unit.name, unit.ranks, unit.mode)
        self.participation.enter(call, is_outermost=is_outermost)
        if is_outermost and (self._left or self._kept) and not self.participation.is_joining:
            self._reshard_overwritten()
            self._renew_kept()
        if call.recomputed:
            self._unshard_for_backward(unit, is_recomputed=True)
        else:
            self.passes.reach(unit.name)
            unit.transition_to(TrainingState.FORWARD)
            if self._groups:
                unit.enter()
            call.order = self._unshard(unit, is_backward=False)
        if torch.is_grad_enabled():
            call.begin(around=self._running[-2] if len(self._running) > 1 else None)
            # A frozen parameter gets no gradient, so gradients of the inputs show when backward no longer reads it.
            if unit.has_frozen_handle:
                call.watch_inputs(inputs)
        for notify in unit.observers.forward:
            notify(unit, inputs)

    def _begin_forward(self, unit: Unit) -> None:
        global _last
        self.has_run = True
        _last = weakref.ref(self)
        if self._threads - {threading.get_ident()}:
            raise called_by_two_threads(self._running[0].unit)
        self._end_running()  # the hooks have found that these forwards are over
        if self._backward is not None:
            self._abandon_backward()
        self._outermost = unit
        self._require_own_units()
        # Not during a backward: a reduced gradient that local shards do not show yet would look like a zeroed gradient.
        for handle in self.handles:
            handle.forget_zeroed()
        self.checks.before_forward(unit)
        self._forward_order.begin()

    def _require_own_units(self) -> None:
        """Raise RuntimeError if another root has taken over a unit."""
        for other in self.units:
            if other.runtime is not self:
                raise RuntimeError(
                    f"a second root: unit '{other.name}' now belongs to another root, since it was sharded and called "
                    "there. Use only one of the two, or call both in the forward of one sharded module. "
                    "(FullyShardedDataParallel has `_reset_lazy_init()`, to be called on this one first.)"
                )

    def _reshard_overwritten(self) -> None:
        """Collective. Reshard handles left unsharded by the last forward if any rank wrote to its shard since.

        Only the rank that wrote may detect the write, but all ranks must take part in the next all-gather.
        """
        self._left = [handle for handle in self._left if handle.phase is Phase.UNSHARDED]
        has_graph = torch.is_grad_enabled()
        by_ranks: dict[Communicator, list[FlatParamHandle]] = {}
        for handle in self._left:
            if has_graph or not handle.policy.keeps_for_inference:
                handle.absorb()
                by_ranks.setdefault(handle.comm, []).append(handle)
        for comm, handles in by_ranks.items():
            flags = torch.stack([handle.is_overwritten for handle in handles]).to("cpu", torch.uint8)
            what = f"comparison of {handles[0].name} with its shards before a forward"
            overwritten = comm.on_host.all_reduce(flags, "max", what).wait().tolist()
            for handle in (handle for handle, flag in zip(handles, overwritten, strict=True) if flag):
                handle.free()
                self._leaves_graph = False  # graphs of the former values can no longer run backward

    def _renew_kept(self) -> None:
        """Discard parameters kept for the backward of the last forward; gather parameters kept until a step."""
        for handle in self._kept:
            handle.renew_kept()

    def new_order(self) -> ExecutionOrder[Unit]:
        """Return a new execution order of units, in which small units are gathered together."""
        return ExecutionOrder(gathered_nbytes, self._small_bytes)

    def _unshard(self, unit: Unit, *, is_backward: bool, is_recomputed: bool = False) -> ExecutionOrder[Unit] | None:
        """Unshard a unit and start the following units; return the order, or None if ranks have no common order."""
        usual = self._backward_order if is_backward else self._forward_order
        if self._waiting:
            self._stop_waiting([unit])
        order = self.participation.order(unit, usual, is_backward=is_backward, is_recomputed=is_recomputed)
        is_needed = not is_backward or is_recomputed or unit.policy.unshard_in_backward
        own, due, later = NOTHING if order is None else order.enter(unit, is_needed and unit.is_incomplete)
        if order is not None:
            asked = unit.policy.backward_prefetch if is_backward else unit.policy.forward_prefetch
            if asked is not None:
                own, due, later = (), [one for one in asked if not (is_backward and one.backward.is_over)], ()
        if self._waiting:
            self._stop_waiting([*own, *due])
        if own and not own[-1].is_unsharding:
            self.unshard_ahead(own, is_backward)
        if is_needed:
            unit.unshard()
        if due:
            self.unshard_ahead(due, is_backward)
        for following in later if self._reads_ahead else ():
            following.read_ahead()
        if is_needed:
            for handle in unit.handles:
                handle.begin_compute()
            for notify in unit.observers.unshard:
                notify(unit)
        return order

    def _stop_waiting(self, units: Iterable[Unit]) -> None:
        """Reshard waiting units in `units` before an all-gather; other ranks may have resharded them already."""
        for unit in {*units}.intersection(self._waiting):
            unit.reshard()
            self._waiting.remove(unit)

    def unshard_ahead(self, units: Iterable[Unit], is_backward: bool) -> None:
        """Start to unshard units; small units share an all-gather."""
        needed = (unit for unit in units if not is_backward or unit.policy.unshard_in_backward)
        unshard_together(needed, self._small_bytes)

    def after_forward(self, unit: Unit, module: nn.Module, output: Any, failed: bool) -> None:
        """Hook: the forward of `unit` returned, or `failed`."""
        for notify in unit.observers.forward_end:
            notify(unit, output, failed)
        if not self._running or self._running[-1].unit is not unit:
            return  # the forward never began: an earlier hook has raised
        call = self._running.pop()
        if call.recomputed:
            unit.forget_written()  # the first forward has already stored these values
        if failed:
            if not call.recomputed:
                self._end_failed_forward(unit)
            return
        if not call.recomputed and unit.was_written:
            self._take_written(unit, only_here=call.order is None)
        needs_backward = torch.is_grad_enabled() and call.watch_outputs(output)
        if call.recomputed:
            if unit.state is not TrainingState.BACKWARD_PRE:
                self._list_shards(unit)
            self.participation.leave(call, output, needs_backward=needs_backward)
            return
        if needs_backward:
            call.number = unit.backward.add(call)
        unit.transition_to(TrainingState.IDLE)
        needed_at_once = (
            needs_backward and unit is not self.root and call.order is not None and call.order.at_expected_end()
        )
        # A loss may leave the module by an attribute, a generator or a closure instead of the output. Backward then
        # reaches the unit without notice, so parameters stay unsharded if the output is not differentiable.
        may_leave = not needs_backward and torch.is_grad_enabled() and any(one.requires_grad for one in unit.handles)
        if unit.yet_to_run:
            unit.yet_to_run -= {module}
        is_resident = unit.policy.keeps_for_inference and not torch.is_grad_enabled()
        is_done = unit.frees_after_forward and not unit.yet_to_run and not is_resident and not self._is_awaited(unit)
        if call.order is None or (is_done and not needed_at_once and not may_leave):
            unit.reshard(is_needed=needs_backward and call.order is not None)
        else:
            self._list_shards(unit)
        self.participation.leave(call, output, needs_backward=needs_backward)
        if not self._running:
            self.passes.end_forward()
            may_need_it = torch.is_grad_enabled() and any(one.requires_grad for one in self.handles)
            self._end_forward(keep=needs_backward or may_need_it)
            if needs_backward and self.has_trained is None:
                self.has_trained = False

    def _is_awaited(self, unit: Unit) -> bool:
        """Return whether an earlier backward with create_graph=True left the unit unsharded for the next backward."""
        return self._leaves_graph and any(handle in self._left for handle in unit.handles)

    def _take_written(self, unit: Unit, *, only_here: bool = False) -> None:
        try:
            if only_here:
                raise RuntimeError(
                    f"{unit.name}: its forward writes to its own parameters, and only some ranks run it (fsdp.cond, "
                    "fsdp.join). Change parameters between steps, inside `with model.summon_full_params():`."
                )
            for handle in unit.handles:
                if handle.was_written:
                    self.checks.merge_written(handle)
        except BaseException:
            self._end_failed_forward(unit)
            raise

    def _end_forward(self, keep: bool) -> None:
        for unit in self.units:
            unit.is_spare = not keep
            if not unit.is_in_use:
                continue
            is_resident = unit.policy.keeps_for_inference and not torch.is_grad_enabled()
            stays = keep or unit.policy.keeps_without_backward or is_resident or self._is_awaited(unit)
            if stays and unit.was_written:  # by the forward of another unit
                self._take_written(unit)
            # Kept for a backward or a module that did not run, or prefetched without need.
            is_left = unit.yet_to_run and unit.frees_after_forward and not is_resident
            if not stays or unit.is_unsharding or is_left:
                unit.reshard()
        for unit in self._groups:
            unit.yet_to_run = NO_MODULES
        self._left = self._unsharded()
        self._settle()

    def unsharded_after(self, unit: Unit) -> Sequence[FlatParamHandle]:
        """Return the handles whose parameters may be outputs; for the outermost module, also handles of inner units."""
        is_outermost = len(self._running) == 1 and not self._running[0].recomputed
        return self._unsharded() if is_outermost else unit.handles

    def _unsharded(self) -> list[FlatParamHandle]:
        return [one for one in self.handles if one.phase is Phase.UNSHARDED and not one.unsharded.is_shard]

    def _end_failed_forward(self, unit: Unit) -> None:
        unit.transition_to(TrainingState.IDLE)
        self._let_go(unit)
        self.participation.fail(unit)
        if not self._running:
            if not isinstance(sys.exc_info()[1], CollectiveError):  # else other ranks compare the position
                self.passes.end_forward()
            for other in self.units:
                self._let_go(other)
            with suppress(RuntimeError):
                self._settle()

    def _let_go(self, unit: Unit) -> None:
        """Reshard after a failure. Errors of collectives in flight are suppressed: an error is already being raised."""
        unit.yet_to_run = NO_MODULES
        for handle in unit.handles:
            with suppress(RuntimeError):
                handle.free()

    def give_up_forward(self, unit: Unit) -> None:
        """End the unit's forward after an exception that torch's hooks do not see, for example KeyboardInterrupt."""
        if any(call.unit is unit and not call.recomputed for call in self._running):
            while self._running:
                call = self._running.pop()
                self._end_failed_forward(call.unit)
                if call.unit is unit:
                    break

    def end_left_forward(self) -> None:
        """End a forward left by such an exception, if the caller did not detect the exception either."""
        if not self._threads:
            self._end_running()

    def _end_running(self) -> None:
        while self._running:
            self._end_failed_forward(self._running.pop().unit)

    def before_backward(self, unit: Unit, call: Call) -> None:
        """Hook: backward reaches an output of a call of `unit`."""
        self.ensure_backward()
        if torch.is_grad_enabled():
            self._leaves_graph = not (self.participation.is_joining or self.participation.is_uneven)
            if not self._leaves_graph and not call.is_transformed:
                raise RuntimeError(
                    f"{unit.name}: backward with create_graph=True is not supported inside fsdp.join, nor where only "
                    "some ranks run a module (fsdp.cond): the next backward needs unsharded parameters, but the other "
                    "ranks would not take part. Use equally many batches and the same modules on all ranks."
                )
        backward = unit.backward
        if is_new := call.backward is not self._backward:
            call.backward = self._backward
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._free_after_backward(one)
            self.passes.reach(unit.name)
            self.participation.reach(call)
            if self.participation.is_uneven:
                self._reductions.release()
            backward.reach(call.number)
            if backward.reached > 1:  # re-entrant checkpoints add unannounced gradients in each call
                backward.missing.update(one for one in unit.trained_handles if not self._usage.is_coming(one))
            if backward.complete:
                self._reduce_complete(unit)
        # If the inputs cannot show when backward has passed the call, the unit stays unsharded until backward ends.
        if call.may_outlast_gradients:
            backward.await_inputs(call)
        if unit.state not in (TrainingState.BACKWARD_PRE, TrainingState.FORWARD):
            unit.transition_to(TrainingState.BACKWARD_PRE)
            self._unshard_for_backward(unit)
        if is_new:
            backward.await_reads(unit.references, call.references, call.checkpoints)
        if call.shards != [handle.state_in_use for handle in unit.handles]:
            raise changed_before_backward(unit)
        for notify in unit.observers.backward:
            notify(unit)

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward of this root is running."""
        return self._backward is not None and self._backward.is_alive

    def ensure_backward(self) -> None:
        """Begin the running backward, unless another hook began it."""
        if self._backward is not None:
            if self._backward.is_alive:
                return
            self._abandon_backward()  # the last backward raised
        self._require_own_units()
        self._backward = BackwardPass(self._end_backward, self._end_failed_backward)
        self._begin_backward()

    def _end_failed_backward(self) -> None:
        """Make units idle and list shards after a backward raised, for state dicts and ``zero_grad()``."""
        for unit in self.units:
            if unit.state is not TrainingState.FORWARD:
                unit.transition_to(TrainingState.IDLE)
                unit.is_spare = True
            self._list_shards(unit)

    def _list_shards(self, unit: Unit) -> None:
        for handle in unit.handles:
            handle.presentation.list_shards()

    def _begin_backward(self, *, brings_nothing: bool = False) -> None:
        self._leaves_graph = self._leaves_graph and retains_graph()
        self._backward_order.begin()
        self._waiting.clear()
        for unit in self.units:
            unit.begin_backward()
        reduced = [one for unit in reversed(self.units) for one in unit.handles if one.gradients.is_reduced]
        self._record_backward(self._outermost, reduced)
        self.participation.begin_backward()
        in_flight = max(unit.policy.reductions_in_flight for unit in self.units)
        self._reductions.begin(reduced, in_flight, brings_nothing=brings_nothing)
        ages = {one: unit.backward.oldest for unit in self.units for one in unit.handles if one.gradients.is_reduced}
        self._usage.begin(ages, self.participation.announced)

    def _record_backward(self, unit: Unit, reduced: Sequence[FlatParamHandle]) -> None:
        divisor, usual = unit.policy.predivide * unit.policy.postdivide, unit.comm.world_size * unit.replicas.world_size
        modes = (
            "under no_sync()" if unit.policy.sync is GradientSync.NONE else "with reduction",
            f"with gradients divided by {divisor:g}",
        )
        unusual = f"{modes[0]} " * (unit.policy.sync is GradientSync.NONE) + modes[1] * (divisor != usual)
        self.passes.begin_backward(unit.name, unit.ranks, modes, unusual.strip(), list(_trained(reduced)))

    def _unshard_for_backward(self, unit: Unit, *, is_recomputed: bool = False) -> None:
        if not unit.backward.missing:
            unit.expect_gradients()
        self._unshard(unit, is_backward=True, is_recomputed=is_recomputed)

    def gradient_complete(self, unit: Unit, handle: FlatParamHandle) -> None:
        """Hook: the gradients of all parameters of `handle` are complete."""
        self.ensure_backward()
        self.has_trained = True
        if unit.state is not TrainingState.FORWARD and not unit.backward.may_come:
            unit.transition_to(TrainingState.BACKWARD_POST)
        unit.backward.missing.discard(handle)
        handle.gradients.begin_round()  # re-entrant checkpoints may add a second round of gradients
        self._free_after_backward(unit)
        self.reduce(unit, handle)
        for notify in unit.observers.gradients_complete:
            notify(unit, handle)

    def reduce(self, unit: Unit, handle: FlatParamHandle) -> None:
        """Reduce the gradient of a handle, unless it continues to accumulate."""
        if not self.participation.announce_gradient(unit, handle):
            return
        if not handle.gradients.is_reduced or self._usage.differs(handle):
            return
        unit.backward.complete.add(handle)
        self._reduce_complete(unit)

    def _reduce_complete(self, unit: Unit) -> None:
        """Reduce the complete handles of a unit, at the same time and in the same order on all ranks.

        Ranks may complete handles at different times if they use different parameters, or use them in different calls
        of the unit. Backward must therefore have reached all calls; in the last call, a handle waits for earlier
        handles that all ranks expect. If the unit contains units, the remaining handles are reduced when backward ends.
        """
        backward = unit.backward
        for each in reversed(unit.handles):
            if each in backward.complete:
                oldest = self._usage.oldest_call(each)
                if oldest > 1 and (oldest > backward.reached or unit.contains_units):
                    return
                backward.complete.discard(each)
                self._reductions.submit(each, keep=self.participation.is_uneven)
            elif each in backward.missing and self._usage.is_coming(each):
                return

    def passed(self, unit: Unit, call: Call) -> None:
        """Hook: backward computed the gradients of the inputs of a call."""
        unit.backward.leave(call)
        if self.is_in_backward:
            self._free_after_backward(unit)

    def _free_after_backward(self, unit: Unit) -> None:
        if self._leaves_graph or unit.state is TrainingState.FORWARD or not unit.backward.is_through:
            return
        if unit.has_frozen_handle and unit.contains_units:
            return  # gradients of inner units may depend on the frozen parameters
        if unit.frees_after_backward:
            if unit.backward.reads_on(unit.references) and not retains_graph():
                self._waiting.append(unit)
                return
            unit.reshard()
            if unit.state is not TrainingState.BACKWARD_POST:
                unit.transition_to(TrainingState.BACKWARD_POST)

    def _end_backward(self) -> None:
        self.participation.end_backward()
        self.passes.end_backward()
        self.finish_backward()

    def finish_backward(self) -> None:
        """Collective. Reduce the remaining gradients when backward ends on all ranks, and show all gradients."""
        for unit in self.units:
            unit.take_assigned_gradients()
        gradients = [handle.gradients for handle in self.handles]
        has_gradient = any(each.has_arrived for each in gradients)
        has_any = has_gradient or any(each.times_taken or not each.is_empty for each in gradients)
        self.has_trained = self.has_trained or has_any or not any(handle.requires_grad for handle in self.handles)
        self._reduce_rest()
        for handle in self.handles:
            handle.mark_unreduced()
        for unit in self.units:
            is_in_use, is_in_forward = unit.is_in_use, unit.state is TrainingState.FORWARD
            # During a forward, an optimizer step may follow if there are gradients; torch.autograd.grad leaves none.
            if is_in_use and (has_gradient or not is_in_forward):
                self._list_shards(unit)
            if is_in_forward:
                continue  # this backward ran during the unit's forward, which continues
            unit.transition_to(TrainingState.IDLE)
            unit.is_spare |= unit.placements.keeps_unsharded or unit.placements.defers_reduction
            if unit.is_unsharding or (is_in_use and unit.frees_after_backward and not self._leaves_graph):
                unit.reshard()
        if not self._running:
            self._left = self._unsharded() if self._leaves_graph else []
        self._settle()
        self.has_deferred = any(unit.policy.sync is not GradientSync.FULL for unit in self._deferring)
        if any(handle.gradients.is_reduced for handle in self.handles):
            self.steps.end_backward()
        self._waiting.clear()
        with torch.no_grad():
            self._usage.show_gradients()
            self._backward = None
            for unit in reversed(self.units):
                for handle in unit.handles:
                    handle.end_backward()
        for notify in self.root.observers.backward_end:
            notify()

    def _reduce_rest(self) -> None:
        """Reduce gradients that did not complete on every rank, and finish all reductions."""
        self._usage.end()
        while any(map(self._usage.is_due, self.handles)):
            for unit in self.units:
                # Checked for each handle, because a bucket reduces multiple handles at once.
                for handle in filter(self._usage.is_due, reversed(unit.handles)):
                    handle.gradients.owe(self._usage.unused(handle))
                    self._reductions.submit(handle)
            self._reductions.finish()
        self._reductions.finish()
        self._usage.note_held()

    def follow_backward(self, *, brings_nothing: bool = False) -> None:
        """Begin a backward without gradients on this rank: other ranks run it, or it `brings_nothing` on any rank."""
        self._backward = FollowedPass()
        self._begin_backward(brings_nothing=brings_nothing)

    def serve_reduction(self, handle: FlatParamHandle) -> None:
        """Take part in the reduction of a handle if only other ranks have a gradient."""
        unit = next(unit for unit in self.units if handle in unit.handles)
        handle.gradients.owe()
        unit.backward.missing.discard(handle)
        if handle.gradients.is_reduced:
            self._reductions.submit(handle, keep=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this context accumulate unsharded gradients without reducing them."""
        self.ensure_idle("enter no_sync()", is_served=True)
        outer = {unit: unit.policy.sync for unit in self.units}
        try:
            self.synchronise(GradientSync.NONE)
            yield
        finally:
            for unit, sync in outer.items():
                unit.policy.sync = sync

    def synchronise(self, sync: GradientSync) -> None:
        """Set which stages of the reduction the next backwards run, for all units."""
        for unit in self.units:
            unit.policy.sync = sync

    def reduce_accumulated(self) -> None:
        """Collective. Reduce accumulated gradients, like a backward that adds no gradients."""
        self.ensure_idle("reduce gradients")
        self.follow_backward(brings_nothing=True)
        try:
            self.finish_backward()
        except BaseException:
            self._backward = FollowedPass(is_alive=False)  # the next pass discards the remaining gradients
            raise

    def reduce_deferred(self) -> None:
        """Collective. Reduce gradients whose placements defer the reduction to the optimizer step, if there are any."""
        if self.has_deferred and not self.is_computing:
            self.reduce_all()

    def reduce_all(self) -> None:
        """Collective. Reduce all accumulated gradients, regardless of their placements."""
        outer = {unit: unit.policy.sync for unit in self.units if unit.placements.defers_reduction}
        try:
            for unit in outer:
                unit.policy.sync = GradientSync.FULL
            self.reduce_accumulated()
        finally:
            for unit, sync in outer.items():
                unit.policy.sync = sync

    def end_step(self, handles: Iterable[FlatParamHandle]) -> None:
        """Free parameters kept across steps, after an optimizer updated the shards of these handles.

        All ranks step the same handles, so the next all-gather requires no agreement between ranks.
        """
        keeping = (u for u in self.units if u.placements.keeps_parameters or not u.policy.reshard_after_backward)
        kept = {handle for unit in keeping for handle in unit.handles}
        for handle in handles if kept and not self.is_computing else ():
            if handle in kept:
                handle.release()

    @property
    def is_computing(self) -> bool:
        """Return whether a forward or backward is running."""
        return bool(self._threads) or (self.is_in_backward and in_backward())

    @property
    def is_computing_here(self) -> bool:
        """Return whether a forward or backward is running in this thread."""
        return threading.get_ident() in self._threads or (self.is_in_backward and in_backward())

    @property
    def _threads(self) -> set[int]:
        return threads_in(self._running[0].unit) if self._running else set()

    def ensure_idle(self, what: str, *, is_served: bool = False) -> None:
        """Raise RuntimeError during a forward or backward; otherwise clear the state left by a failed pass.

        Also raise inside `fsdp.join`, where finished ranks would not take part, unless the operation `is_served` there.
        """
        self.end_left_forward()
        if self.is_computing:
            raise RuntimeError(f"cannot {what} in the middle of a forward or backward of {self.root.name}")
        if self.participation.is_joining and not is_served:
            raise RuntimeError(
                f"cannot {what} inside fsdp.join: ranks that have finished do not take part. Do it after the context"
            )
        if self._backward is not None:
            self._abandon_backward()

    def forget(self) -> None:
        """Release all units; the next forward determines again which unit is outermost."""
        self.ensure_idle("reset")
        self.release()
        for unit in self.units:
            unit.runtime = None

    def release(self) -> None:
        """Store written values in the shards, and free all other parameters kept between passes.

        Raises:
            RuntimeError: if written values cannot be stored.
        """
        for handle in self.handles:
            handle.absorb()
        for unit in self.units:
            unit.release()
        self._settle()

    def reset_iteration(self) -> None:
        """Discard an aborted forward or backward, and all unreduced gradients."""
        self.ensure_idle("reset the iteration", is_served=True)
        self._abandon_backward()

    def _abandon_backward(self) -> None:
        """Discard an aborted backward and its unreduced gradients. Units whose forward is running keep running."""
        self._backward = None
        self.participation.abandon()
        self._usage.abandon()
        self._reductions.abandon()
        for unit in self.units:
            for handle in unit.handles:
                handle.drop_unreduced()
            if unit.state is not TrainingState.FORWARD:
                unit.transition_to(TrainingState.IDLE)
                unit.reshard()
        self._settle()

    def _settle(self) -> None:
        comms = {handle.kept_shard.comm for handle in self._kept if handle.kept_shard is not None}
        for unit in self.units:
            comms.update((unit.comm, *unit.axes))
        for comm in comms:
            comm.settle()
        if self._reads_ahead:
            for device in {unit.device for unit in self.units}:
                copy_stream_of(device).settle()


def _trained(handles: Sequence[FlatParamHandle]) -> Iterator[str]:
    """Yield the names of handles with trained parameters, each with the names of its frozen parameters."""
    for handle in handles:
        if not handle.has_frozen:
            yield handle.name
            continue
        each = zip(handle.layout.slots, handle.requires_grad_each, strict=True)
        frozen = [slot.name for slot, is_trained in each if not is_trained]
        if len(frozen) < len(handle.layout.slots):
            yield f"{handle.name} without {', '.join(frozen)}"


_last: weakref.ref[Runtime] | None = None
_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


@uncompiled
def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime of a unit. The unit becomes the root if no unit around it has run."""
    return cast("Runtime", unit.ensure_runtime())


def runtime_of_root(unit: Unit, method: str) -> Runtime:
    """Return the runtime of an outermost unit; raise a RuntimeError that names `method` for an inner unit."""
    runtime = runtime_of(unit)
    if runtime.root is not unit:
        raise RuntimeError(
            f"{method} is for the outermost sharded module, but '{unit.name}' is inside {runtime.root.name}. Call it "
            "there."
        )
    return runtime


def runtimes() -> list[Runtime]:
    """Return the runtimes of all used models."""
    return [runtime for runtime in _all if runtime.root.runtime is runtime]


@uncompiled
def reduce_deferred(shards: Iterable[Any]) -> None:
    """Collective. Reduce deferred gradients of the models that contain any of these shards."""
    deferring = [runtime for runtime in runtimes() if runtime.has_deferred]
    wanted = {id(shard) for shard in shards} if deferring else ()
    for runtime in deferring:
        if any(id(handle.flat_param) in wanted for handle in runtime.handles):
            runtime.reduce_deferred()


def running() -> Runtime | None:
    """Return a runtime whose forward or backward runs now, preferably in this thread; of several the last to begin."""
    last = None if _last is None else _last()
    every = [one for one in (last, *runtimes()) if one is not None and one.is_computing]
    return max(every, key=lambda one: one.is_computing_here, default=None)
