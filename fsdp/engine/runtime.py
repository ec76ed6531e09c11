"""The runtime of a root: it decides when each unit is unsharded, resharded and reduced, driven by the units' hooks.

A step, as the hooks report it:

1. *Forward of a unit.* The unit is unsharded. Before it computes, the all-gather of the unit expected next is issued,
   so that it travels while this one computes. Afterwards the unit is resharded, unless backward needs it at once (the
   root, the last unit of the forward) or the user asked to keep it.
2. *Backward reaches a unit's outputs.* The same, along the order that the last backward took.
3. *A gradient is complete.* When the last parameter of a handle has its gradient the unit is resharded and the
   reduction is started; it is finished when the next one has been started, or at the end.
4. *Backward ends.* What did not complete (unused parameters) is settled, reductions are finished, units are idle.

A backward may run inside of a forward: units whose forward is running stay in that state, and keep their parameters.

So at most the units in computation, one prefetched unit and two reductions are alive beside the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.distributed.communicator import Communicator
from fsdp.distributed.devices import copy_stream_of
from fsdp.engine.autograd import BackwardPass, FollowedPass, in_backward
from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.forward_hooks import Call
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle, Phase
from fsdp.engine.memory import return_freed_memory
from fsdp.engine.merged_writes import merge_written
from fsdp.engine.participation import EvenRanks, Participation
from fsdp.engine.reduction import Reductions
from fsdp.engine.registration import Contents
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.shared_params import settle_shares
from fsdp.engine.steps import Steps
from fsdp.engine.unit import TrainingState, Unit, units_in
from fsdp.engine.usage import Usage
from fsdp.engine.verify import agree, agree_on_values, refuse_ddp, refuse_strangers


class Runtime:
    """The schedule of all units of one tree.

    Collective at construction: the ranks compare what they have built; their values at the first forward.

    Args:
        root: the outermost unit.
        bucket_bytes: see `Reductions`.

    Raises:
        RuntimeError: if an inner unit already belongs to a root of its own, the ranks built different models, or a
            parameter was added after wrapping.
    """

    def __init__(self, root: Unit, *, bucket_bytes: int) -> None:
        self.root = root
        named_units = units_in(root)
        self.units = [unit for _, unit in named_units]
        settle_shares(root, named_units, all_inside=True)
        refuse_strangers(root.module, self.units)
        agree(root.everyone, named_units, to_run=True)
        self._adopt(named_units)
        return_freed_memory()
        self.has_run = False  # a forward has begun with the root
        self._reductions = Reductions(bucket_bytes)
        self._usage = Usage()
        self.steps = Steps(root)
        self._forward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._backward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._left: list[FlatParamHandle] = []  # left unsharded by the last forward; no backward has run since
        self._running: list[Call] = []  # forwards that are running, the innermost last
        self._backward: BackwardPass | FollowedPass | None = None  # the one that is running, or that raised
        self.handles = [handle for unit in self.units for handle in unit.handles]
        self.participation: Participation = EvenRanks()
        self._contents = Contents(root.module)
        self._await_values = True  # some units, until it was looked at
        self._has_compared_values = False  # not yet: a checkpoint may be loaded before anything is computed
        # Whether a gradient has ever come; None before the first forward that may bring one.
        self.has_trained: bool | None = None
        _all.add(self)

    # --- whose units and parameters are whose ---------------------------------------------------------------------

    def _adopt(self, named_units: Sequence[tuple[str, Unit]]) -> None:
        """Run all units inside of the root.

        Raises:
            RuntimeError: if one has become a root itself.
        """
        kind = type(self.root.module).__name__
        for name, unit in named_units:
            before = unit.runtime
            if before is not None and before.root is unit is not self.root and before.has_run:
                raise RuntimeError(
                    f"a second root: unit '{name}' was called on its own before the {kind} around it, and became a "
                    "root itself. Call the outermost unit first. (FullyShardedDataParallel has `_reset_lazy_init()` "
                    "for this, to be called on the inner one before the outer one is used.)"
                )
        for name, unit in named_units:
            if unit.runtime is not None:
                unit.runtime.ensure_idle(f"become part of another {kind}")
            unit.runtime = self
            unit.rename(name)
            unit.is_inside_mixed = False
        for _, unit in named_units:
            for _, inner in units_in(unit) if unit.precision.is_mixed else ():
                inner.is_inside_mixed |= inner is not unit

    # --- forward ------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, inputs: Any) -> None:
        """Hook: `unit` is about to compute."""
        unit.end_load()
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{unit.name}: forward inside summon_full_params() works for inference only, because gradients "
                    "would go to the summoned copies and be lost. Use torch.no_grad(), or leave the context first."
                )
            return
        call = Call(unit, recomputed=self.is_in_backward and in_backward())
        is_outermost = not call.recomputed and (not self._running or unit is self.root)
        if is_outermost:
            self._begin_forward(unit)
        self._running.append(call)
        self.participation.enter(call, is_outermost=is_outermost)
        if is_outermost:
            self._reshard_overwritten()
        if call.recomputed:
            if unit.state is not TrainingState.BACKWARD_PRE:
                unit.follow_mode()  # a re-entrant checkpoint left nothing else that tells what its forward was in
            self._unshard_for_backward(unit, is_recomputed=True)
        else:
            unit.transition_to(TrainingState.FORWARD)
            unit.enter()
            unit.follow_mode()
            call.order = self._unshard(unit, is_backward=False)
        unit.list_unsharded()
        # A frozen parameter has no gradient whose arrival would tell that backward is done with it.
        if torch.is_grad_enabled() and unit.has_frozen_handle:
            call.watch_inputs(inputs)

    def _begin_forward(self, unit: Unit) -> None:
        global _last
        self.has_run = True
        _last = weakref.ref(self)
        if self._running or self._backward is not None:
            self._recover()
        for other in self.units:
            if other.runtime is not self:
                raise RuntimeError(
                    f"a second root: unit '{other.name}' now belongs to another root, since it was sharded and called "
                    "there. Use only one of the two. (FullyShardedDataParallel has `_reset_lazy_init()`, to be called "
                    "on this one first.)"
                )
        if DistributedDataParallel._active_ddp_module is not None:
            refuse_ddp(DistributedDataParallel._active_ddp_module, self.root, self.handles)
        if torch.is_grad_enabled() and self._contents.have_changed():
            refuse_strangers(self.root.module, self.units)
            self._contents = Contents(self.root.module)
        # Not inside of a backward, where a gradient that is reduced and not shown by local shards yet looks the same.
        for handle in self.handles:
            if handle.orig_params is not None:
                handle.orig_params.forget_zeroed()
        self.trust_values(unit)
        self._forward_order.begin()

    def _reshard_overwritten(self) -> None:
        """Collective. Reshard the handles that the last forward left unsharded, if any rank wrote to its shard since.

        Only the rank that wrote may notice, and all ranks must take part in the all-gather.
        """
        left, self._left = self._left, []
        if self.participation.is_joining:
            return  # ranks without batches take part in all-gathers only
        by_ranks: dict[Communicator, list[FlatParamHandle]] = {}
        for handle in left:
            if handle.phase is Phase.UNSHARDED:
                handle.absorb()
                by_ranks.setdefault(handle.comm, []).append(handle)
        for comm, handles in by_ranks.items():
            flags = torch.stack([handle.is_overwritten for handle in handles]).to(comm.talk_device, torch.uint8)
            what = f"comparison of {handles[0].name} with its shards before a forward"
            overwritten = comm.all_reduce(flags, "max", what).wait().tolist()
            for handle in (handle for handle, flag in zip(handles, overwritten, strict=True) if flag):
                handle.reshard()
        for shard in filter(None, (handle.post_forward_shard for handle in self.handles)):
            shard.forget()

    def trust_values(self, unit: Unit) -> None:
        """Collective the first time. Raise RuntimeError if parameters have no values, or other ones on other ranks."""
        if self._await_values:
            require_values_everywhere(unit, "compute")
            self._await_values = any(one.awaits_values_somewhere for one in self.units)
        if not self._has_compared_values:
            agree_on_values([(one.name, one) for one in self.units])
            self._has_compared_values = True
            return_freed_memory()

    def _unshard(self, unit: Unit, *, is_backward: bool, is_recomputed: bool = False) -> ExecutionOrder[Unit] | None:
        """Unshard a unit, and start what comes next; returns the order that says so, None if ranks have none alike."""
        usual = self._backward_order if is_backward else self._forward_order
        order = self.participation.order(unit, usual, is_backward=is_backward, is_recomputed=is_recomputed)
        ahead: Sequence[Unit] = ()
        started = 1  # of those ahead; the others are only read from disk
        if order is not None:
            ahead = order.enter(unit)
            asked = unit.policy.ahead(is_backward)
            if asked is not None:
                ahead, started = asked, len(asked)
        is_needed = not is_backward or is_recomputed or unit.policy.unshard_in_backward
        if is_needed:
            unit.unshard()
        for number, following in enumerate(ahead):
            if is_backward and not following.policy.unshard_in_backward:
                continue
            if number < started:
                if not is_backward:
                    following.follow_mode()
                following.unshard()
            else:
                following.read_ahead()
        if is_needed:
            unit.wait_for_unshard()
        return order

    def after_forward(self, unit: Unit, module: nn.Module, output: Any, failed: bool) -> None:
        """Hook: `unit` has computed, or `failed` to."""
        if not self._running or self._running[-1].unit is not unit:
            return  # it never began: a hook before ours has raised
        call = self._running.pop()
        if unit.state is not TrainingState.BACKWARD_PRE:
            unit.list_shards()
        if call.recomputed:
            unit.forget_written()  # the forward has written it already
        if failed:
            if not call.recomputed:
                self._end_failed_forward(unit)
            return
        if not call.recomputed and unit.was_written:
            self._take_written(unit, only_here=call.order is None)
        needs_backward = torch.is_grad_enabled() and call.watch_outputs(output)
        if call.recomputed:
            self.participation.leave(call, output, needs_backward=needs_backward)
            return
        if needs_backward:
            unit.backward.add(call)
        unit.transition_to(TrainingState.IDLE)
        needed_at_once = (
            needs_backward and unit is not self.root and call.order is not None and call.order.at_expected_end()
        )
        # A loss may leave by another way than the output (an attribute, a generator, a closure). Backward then comes to
        # the unit unannounced: where the output shows nothing to differentiate, it finds the parameters in place.
        may_leave = not needs_backward and torch.is_grad_enabled() and any(one.requires_grad for one in unit.handles)
        unit.yet_to_run.discard(module)
        is_done = unit.frees_after_forward and not unit.yet_to_run
        if call.order is None or (is_done and not needed_at_once and not may_leave):
            unit.reshard(keeps_post_forward_shard=needs_backward and call.order is not None)
        self.participation.leave(call, output, needs_backward=needs_backward)
        if not self._running:
            may_need_it = torch.is_grad_enabled() and any(one.requires_grad for one in self.handles)
            self._end_forward(keep=needs_backward or may_need_it)
            if needs_backward and self.has_trained is None:
                self.has_trained = False

    def _take_written(self, unit: Unit, *, only_here: bool = False) -> None:
        try:
            if only_here:
                raise RuntimeError(
                    f"{unit.name}: its forward writes to its own parameters, and only some ranks run it (fsdp.cond, "
                    "fsdp.join). Change parameters between steps, inside `with model.summon_full_params():`."
                )
            for handle in unit.handles:
                if handle.was_written:
                    merge_written(handle)
        except BaseException:
            self._end_failed_forward(unit)
            raise

    def _end_forward(self, keep: bool) -> None:
        for unit in self.units:
            unit.is_spare = not keep
            stays = keep or unit.policy.keeps_without_backward
            if stays and unit.was_written:  # by the forward of others
                self._take_written(unit)
            # Kept for a backward that doesn't come, or for a module that was not run, or prefetched in vain.
            if not stays or unit.is_unsharding or (unit.yet_to_run and unit.frees_after_forward):
                unit.reshard()
            unit.yet_to_run.clear()
        self._left = [one for one in self.handles if one.phase is Phase.UNSHARDED and one.is_sharded]
        self._settle()

    def _end_failed_forward(self, unit: Unit) -> None:
        unit.transition_to(TrainingState.IDLE)
        unit.yet_to_run.clear()
        self._let_go(unit)
        self.participation.fail(unit)
        if not self._running:
            for other in self.units:
                self._let_go(other)
            with suppress(RuntimeError):
                self._settle()

    def _let_go(self, unit: Unit) -> None:
        """Reshard after a failure: that of what is still in flight says no more than the error that is raised."""
        for handle in unit.handles:
            with suppress(RuntimeError):
                handle.reshard()

    def give_up_forward(self, unit: Unit) -> None:
        """An exception that torch's hooks do not see (KeyboardInterrupt, say) has ended the unit's forward."""
        if any(call.unit is unit and not call.recomputed for call in self._running):
            while self._running:
                call = self._running.pop()
                self._end_failed_forward(call.unit)
                if call.unit is unit:
                    break

    # --- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, call: Call) -> None:
        """Hook: backward has reached an output of a call of `unit`."""
        if torch.is_grad_enabled() and not call.is_transformed:
            raise RuntimeError(
                f"{unit.name}: backward with create_graph=True is not supported: the second backward would need "
                "unsharded parameters, and nothing unshards them. Compute such gradients on the unwrapped module, "
                "inside summon_full_params()."
            )
        self.ensure_backward()
        backward = unit.backward
        if call.in_full_precision is not unit.in_full_precision:
            if unit.state is TrainingState.FORWARD or (unit.state is TrainingState.BACKWARD_PRE and backward.missing):
                raise RuntimeError(
                    f"{unit.name}: one backward goes through calls of it in train() and in eval(), which compute in "
                    "different precisions (full_precision_in_eval=True). Run a backward for each."
                )
            unit.compute_in_full(call.in_full_precision)
            unit.transition_to(
                TrainingState.BACKWARD_POST
            )  # of calls in the other precision, which has leaves of its own
            unit.expect_gradients()
        if call.backward is not self._backward:
            call.backward = self._backward
            self.participation.reach(call)
            if self.participation.is_uneven:
                self._reductions.drain()
            backward.reach(call)
            if backward.reached > 1:  # what autograd didn't announce, re-entrant checkpoints bring in each call anew
                backward.missing.update(one for one in unit.trained_handles if not self._usage.is_coming(one))
            if backward.complete:
                self._reduce_complete(unit)
        # If the inputs don't tell when it has passed, the unit is kept until the backward ends.
        if call.may_outlast_gradients:
            backward.await_inputs(call)
        if unit.state not in (TrainingState.BACKWARD_PRE, TrainingState.FORWARD):
            unit.transition_to(TrainingState.BACKWARD_PRE)
            self._unshard_for_backward(unit)
            unit.list_unsharded()
        if call.shards != [handle.state_in_use for handle in unit.handles]:
            raise RuntimeError(
                f"{unit.name}: its parameters were changed (by an optimizer step, or a cast?) between forward and "
                "backward, so gradients would belong to neither the old nor the new values. Run backward "
                "before the change, or forward again after it."
            )

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward of this root is running."""
        return self._backward is not None and self._backward.is_alive

    def ensure_backward(self) -> None:
        """A backward is running: the first to notice begins it."""
        if self.is_in_backward:
            return
        if self._backward is not None:
            self._abandon_backward()  # the last one raised
        self._backward = BackwardPass(self._end_backward, self._list_shards)
        self._begin_backward()

    def _list_shards(self) -> None:
        """A backward has failed: what users call next, such as ``zero_grad()``, must find the shards."""
        for unit in self.units:
            unit.list_shards()

    def _begin_backward(self) -> None:
        self._backward_order.begin()
        for unit in self.units:
            unit.begin_backward()
        reduced = [one for unit in reversed(self.units) for one in unit.handles if one.gradients.is_reduced]
        self.participation.begin_backward(reduced)
        self._reductions.begin(reduced, max(unit.policy.reductions_in_flight for unit in self.units))
        ages = {one: unit.backward.oldest for unit in self.units for one in unit.handles if one.gradients.is_reduced}
        self._usage.begin(ages, ranks_begin_together=not self.participation.is_uneven)

    def _unshard_for_backward(self, unit: Unit, *, is_recomputed: bool = False) -> None:
        if not unit.backward.missing:
            unit.expect_gradients()
        self._unshard(unit, is_backward=True, is_recomputed=is_recomputed)

    def gradient_complete(self, unit: Unit, handle: FlatParamHandle) -> None:
        """Hook: every parameter of `handle` has its gradient."""
        self.ensure_backward()
        self.has_trained = True
        if unit.state is not TrainingState.FORWARD and not unit.backward.may_come:
            unit.transition_to(TrainingState.BACKWARD_POST)
        unit.backward.missing.discard(handle)
        handle.gradients.begin_round()  # re-entrant checkpoints may bring a second round
        self._free_after_backward(unit)
        self.reduce(unit, handle)

    def reduce(self, unit: Unit, handle: FlatParamHandle) -> None:
        """Have a handle's gradient reduced, unless it goes on to accumulate."""
        if not self.participation.announce_gradient(unit, handle):
            return
        if not handle.gradients.is_reduced or self._usage.differs(handle):
            return
        unit.backward.complete.add(handle)
        self._reduce_complete(unit)

    def _reduce_complete(self, unit: Unit) -> None:
        """Have the handles of a unit reduced that are complete, at the same time and in the same order on all ranks.

        They may complete at different ones, where ranks use different parameters, or use them in different calls of
        the unit. So backward must have come to all calls; and in the last one, a handle waits for those before it that
        all ranks expect. What is left (of units around others, whose calls come between) is reduced when backward ends.
        """
        backward = unit.backward
        for each in reversed(unit.handles):
            if each in backward.complete:
                oldest = self._usage.oldest_call(each)
                if oldest > 1 and (oldest > backward.reached or unit.contains_units):
                    return
                backward.complete.discard(each)
                self._reductions.submit(each, unit.postdivide, keep=self.participation.is_uneven)
            elif each in backward.missing and self._usage.is_coming(each):
                return

    def passed(self, unit: Unit, call: Call) -> None:
        """Hook: backward has the gradients of the inputs of a call."""
        unit.backward.leave(call)
        if self.is_in_backward:
            self._free_after_backward(unit)

    def _free_after_backward(self, unit: Unit) -> None:
        if unit.state is TrainingState.FORWARD or not unit.backward.is_through:
            return
        if unit.has_frozen_handle and unit.contains_units:
            return  # what is frozen may be on the way to the gradients of the units inside
        if unit.frees_after_backward:
            unit.reshard()
            unit.transition_to(TrainingState.BACKWARD_POST)

    def _end_backward(self) -> None:
        self.participation.end_backward()
        self.finish_backward()

    def finish_backward(self) -> None:
        """Collective. Backward has ended on all ranks: reduce what is left of its gradients, and show all of them."""
        has_gradient = any(handle.gradients.has_arrived for handle in self.handles)
        has_any = has_gradient or any(one.gradients.times_taken or not one.gradients.is_empty for one in self.handles)
        self.has_trained = self.has_trained or has_any or not any(handle.requires_grad for handle in self.handles)
        self._reduce_rest()
        self._left = []
        for handle in self.handles:
            handle.mark_unreduced()
        for unit in self.units:
            unit.backward.end()
            # Inside of a running forward, gradients may be stepped next; torch.autograd.grad leaves none.
            if has_gradient or unit.state is not TrainingState.FORWARD:
                unit.list_shards()
            if unit.state is TrainingState.FORWARD:
                continue  # this backward was inside of its forward, which goes on
            unit.transition_to(TrainingState.IDLE)
            if unit.frees_after_backward or unit.is_unsharding:
                unit.reshard()
        self._settle()
        if any(handle.gradients.is_reduced for handle in self.handles):
            self.steps.end_backward()
        with torch.no_grad():
            self._usage.show_gradients()
            self._backward = None
            for unit in reversed(self.units):
                for handle in unit.handles:
                    handle.gradient_hooks.end_backward()

    def _reduce_rest(self) -> None:
        """Reduce what did not complete on every rank, and finish all reductions."""
        self._usage.end()
        while any(map(self._usage.is_due, self.handles)):
            for unit in self.units:
                # Asked one by one, because a bucket reduces several at once.
                for handle in filter(self._usage.is_due, reversed(unit.handles)):
                    handle.gradients.owe(self._usage.unused(handle))
                    self._reductions.submit(handle, unit.postdivide)
            self._reductions.finish()
        self._reductions.finish()

    # --- backwards of other ranks -------------------------------------------------------------------------------

    def follow_backward(self) -> None:
        """Begin a backward that brings no gradients here: other ranks run it, or it reduces what has accumulated."""
        self._backward = FollowedPass()
        self._begin_backward()

    def serve_reduction(self, handle: FlatParamHandle) -> None:
        """Take part in the reduction of a handle of which others have a gradient."""
        unit = next(unit for unit in self.units if handle in unit.handles)
        handle.gradients.owe()
        unit.backward.missing.discard(handle)
        if handle.gradients.is_reduced:
            self._reductions.submit(handle, unit.postdivide, keep=True)

    # --- between steps ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate unsharded gradients without reducing them."""
        self.ensure_idle("enter no_sync()", is_served=True)
        outer = {unit: unit.policy.sync for unit in self.units}
        try:
            self.synchronise(GradientSync.NONE)
            yield
        finally:
            for unit, sync in outer.items():
                unit.policy.sync = sync

    def synchronise(self, sync: GradientSync) -> None:
        """Have the gradients of all units go this far from now on."""
        for unit in self.units:
            unit.policy.sync = sync

    def reduce_accumulated(self) -> None:
        """Collective. Reduce what has accumulated, as a backward that brings nothing more."""
        self.ensure_idle("reduce gradients")
        self.follow_backward()
        self.finish_backward()

    @property
    def is_computing(self) -> bool:
        """Return whether a forward or backward is running."""
        return bool(self._running) or (self.is_in_backward and in_backward())

    def ensure_idle(self, what: str, *, is_served: bool = False) -> None:
        """Raise RuntimeError unless nothing runs; what a failed forward or backward left behind is cleared first.

        Inside of `fsdp.join` too, where ranks that have finished would not take part, unless it `is_served` there.
        """
        if self.is_computing:
            raise RuntimeError(f"cannot {what} in the middle of a forward or backward of {self.root.name}")
        if self.participation.is_joining and not is_served:
            raise RuntimeError(
                f"cannot {what} inside fsdp.join: ranks that have finished don't. Do it after the context"
            )
        if self._backward is not None:
            self._recover()

    def forget(self) -> None:
        """Let go of all units: the next one used finds out again which is outermost."""
        self.ensure_idle("reset")
        self.release()
        for unit in self.units:
            unit.runtime = None

    def release(self) -> None:
        """Reshard what is kept unsharded between passes (after `no_sync`, or without a backward)."""
        for unit in self.units:
            unit.reshard()
        self._settle()

    def reset_iteration(self) -> None:
        """Forget a forward or backward that was given up, and all gradients that were not reduced."""
        if self.is_in_backward and in_backward():
            raise RuntimeError(f"cannot reset the iteration in the middle of a backward of {self.root.name}")
        self._recover()

    def _recover(self) -> None:
        """Back to idle after a forward or backward that was given up; its unreduced gradients are dropped."""
        self._running.clear()
        for unit in self.units:
            unit.transition_to(TrainingState.IDLE)
            unit.yet_to_run.clear()
        self._abandon_backward()

    def _abandon_backward(self) -> None:
        """Forget a backward that was given up, with its unreduced gradients. Units whose forward is running go on."""
        self._backward = None
        self.participation.abandon()
        self._usage.abandon()
        self._reductions.abandon()
        for unit in self.units:
            unit.backward.end()
            for handle in unit.handles:
                handle.drop_unreduced()
            if unit.state is not TrainingState.FORWARD:
                unit.transition_to(TrainingState.IDLE)
                unit.reshard()
        self._settle()

    def _settle(self) -> None:
        kept = [handle.post_forward_shard for unit in self.units for handle in unit.handles]
        comms = {shard.comm for shard in kept if shard is not None}
        for comm in comms.union([unit.comm for unit in self.units], [unit.replicas for unit in self.units]):
            comm.settle()
        for device in {unit.device for unit in self.units}:
            copy_stream_of(device).settle()


_last: weakref.ref[Runtime] | None = None
_all: weakref.WeakSet[Runtime] = weakref.WeakSet()


def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime of a unit, which becomes the root if none around it has run."""
    return cast("Runtime", unit.ensure_runtime())


def runtime_of_root(unit: Unit, method: str, kind: str = "FullyShardedDataParallel") -> Runtime:
    """Return the runtime of an outermost unit; a method that is for those raises RuntimeError on others."""
    runtime = runtime_of(unit)
    if runtime.root is not unit:
        raise RuntimeError(
            f"{method} is for the outermost {kind}; '{unit.name}' lies inside {runtime.root.name}. Call it there."
        )
    return runtime


def runtimes() -> list[Runtime]:
    """Return those of all models that have been used."""
    return [runtime for runtime in _all if runtime.root.runtime is runtime]


def running() -> Runtime | None:
    """Return the runtime whose forward or backward runs now; the one that began last, if there are several."""
    runtime = None if _last is None else _last()
    return runtime if runtime is not None and runtime.is_computing else None
