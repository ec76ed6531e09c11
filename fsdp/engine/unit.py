"""A unit: one wrapped module, its handles, and its state.

A unit contains modules and parameters; the runtime decides when they are unsharded and resharded.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from fsdp.distributed.collectives import LONE_RANK, Communicator
from fsdp.distributed.communicator import begin_range, own_rank
from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import named_modules
from fsdp.engine.observers import NONE, Observers
from fsdp.engine.originals import Places
from fsdp.engine.phase import Phase
from fsdp.engine.placements import Placements
from fsdp.engine.policy import Policy
from fsdp.engine.precision import Buffers, Precision, compute_in_own_dtype, kept_modules
from fsdp.engine.presentation import lenders
from fsdp.engine.shard import Shard
from fsdp.engine.unit_backward import UnitBackward

if TYPE_CHECKING:
    from fsdp.engine.kept_shard import KeptShard

# The module attribute that contains the unit, so that both are deleted and copied together.
_ATTRIBUTE = "_fsdp_unit"

NO_MODULES: frozenset[nn.Module] = frozenset()  # shared by all units: each empty set is an object of 216 bytes

_Request = TypeVar("_Request")

_log = logging.getLogger(__name__)


class TrainingState(Enum):
    """The state of a unit; the names are FairScale's."""

    IDLE = auto()  # between its computations
    FORWARD = auto()  # the forward of the module is running
    BACKWARD_PRE = auto()  # backward reached the outputs; parameters are unsharded
    BACKWARD_POST = auto()  # gradients are complete; the backward of other units continues
    SUMMON_FULL_PARAMS = auto()  # modules list unsharded parameters as ordinary parameters


class UnitRuntime(Protocol):
    """The part of a `Runtime` used by its units and their hooks."""

    @property
    def root(self) -> Unit: ...

    @property
    def has_run(self) -> bool: ...

    @property
    def inside_mixed(self) -> Collection[Unit]: ...

    @property
    def participation(self) -> Any: ...

    def before_forward(self, unit: Unit, inputs: Any) -> None: ...

    def unsharded_after(self, unit: Unit) -> Sequence[FlatParamHandle]: ...

    def after_forward(self, unit: Unit, module: nn.Module, output: Any, failed: bool) -> None: ...

    def give_up_forward(self, unit: Unit) -> None: ...

    def end_left_forward(self) -> None: ...

    def before_backward(self, unit: Unit, call: Any) -> None: ...

    def passed(self, unit: Unit, call: Any) -> None: ...

    def ensure_backward(self) -> None: ...

    def gradient_complete(self, unit: Unit, handle: FlatParamHandle) -> None: ...

    def ensure_idle(self, what: str, *, is_served: bool = False) -> None: ...

    def release(self) -> None: ...

    def forget(self) -> None: ...


@dataclass(eq=False)
class Wanted:
    """A parameter of a unit's module that another unit took and does not share yet."""

    handle: FlatParamHandle
    owner: Unit  # the unit that took the parameter
    places: Places  # in the module of the unit that wants the parameter


@dataclass(eq=False)
class Share:
    """A handle whose parameter the modules of several units use."""

    handle: FlatParamHandle
    members: list[Unit]  # the units that use the parameter; the first took it
    holder: Unit  # the unit that runs the handle now

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"holder": self.members[0]}  # a copy may contain only a part of the model


class ModuleGroup(nn.ModuleList):
    """Modules that form a single unit and have no common parent module that contains only them."""


class _HandlesOfCopy:
    """Completes the handles of a copied unit lazily, once all modules of the unit have been copied."""

    def __get__(self, unit: Unit, _: type[Unit]) -> Any:
        unit.wake()
        return unit.__dict__["handles" if "handles" in unit.__dict__ else "_incomplete_handles"]


class Unit:
    """Runs the parameters of one wrapped module that no inner unit took, or of a group of modules.

    Args:
        module: the module that gets the hooks; for a `ModuleGroup`, each module in the group.
        placements: where parameters, gradients and optimizer state are stored between uses.
        comm: the ranks that share the parameters.
        replicas: the ranks that hold the same shards as this rank, and sum gradients with this rank.
        axes: the ranks along the shard axis and the replica axis.
        ranks: the global ranks across which gradients are summed, as far as torch knows them.
        precision: the dtypes of the computation.
        device: the device of the computation.
        ignored: inner modules and parameters that are ignored.
        policy: the user's settings, which may change later.
        settings: options by name, which must be the same on all ranks.
        new_runtime: creates the runtime of a tree for the given outermost unit.
    """

    # Hidden by the instance attribute. A `__getattr__` would make all attributes slow.
    handles: list[FlatParamHandle] = cast(Any, _HandlesOfCopy())
    observers: Observers = NONE
    unfinished_load: Callable[[], None] | None = None  # ends a load, even if aborted
    uncast: Collection[tuple[nn.Module, str]] = ()  # places of parameters that a policy does not cast
    _range: record_function | None = None  # shown by profilers for the present state

    def __init__(
        self,
        module: nn.Module,
        placements: Placements,
        comm: Communicator,
        replicas: Communicator,
        axes: tuple[Communicator, Communicator],
        ranks: frozenset[int],
        precision: Precision,
        device: torch.device,
        ignored: Ignored,
        *,
        policy: Policy,
        settings: Mapping[str, Any],
        new_runtime: Callable[[Unit], UnitRuntime],
    ) -> None:
        self.module = module
        self.placements, self.axes = placements, axes
        self.comm, self.replicas, self.ranks = comm, replicas, ranks
        self.device = device
        self.ignored = ignored
        ours = [inner for inner in own_modules(module) if inner not in ignored.modules]
        kept = kept_modules(ours, precision)
        self._kept = frozenset({inner for group in kept.values() for inner in group}) or NO_MODULES
        # Before our own hooks, which then run around the hooks that keep a module's precision.
        casting = kept if precision.is_mixed else {}
        self.hooks: list[Any] = [hook for outermost in casting for hook in compute_in_own_dtype(outermost)]
        self.precision = precision.without_casts() if module in self._kept else precision
        self.requests: dict[type[Any], Any] = {}  # the running operations on the state; see `request`
        self.buffers = Buffers([inner for inner in ours if inner not in self._kept], precision.buffers)
        self.handles = []  # run by this unit, one for each flat parameter
        self.owned_handles: list[FlatParamHandle] = []  # of parameters taken by this unit, even if other units run them
        self.wanted: list[Wanted] = []  # parameters of the module that another unit took
        self.shares: list[Share] = []  # parameters used together with, or run for, other units
        self.policy = policy
        self.settings = settings
        self.name = type(module).__name__
        self.state = TrainingState.IDLE
        self.runtime: UnitRuntime | None = None
        self.is_spare = False  # unsharded only because not resharded yet, not at a user's request
        self.backward = UnitBackward()
        self._new_runtime = new_runtime
        for each in (module, *self.modules):
            each.__dict__[_ATTRIBUTE] = self
        self.yet_to_run = NO_MODULES  # modules of a group that this forward has not reached

    def transition_to(self, state: TrainingState) -> None:
        """Set the state. Profilers show forward and backward as ranges, and the debug log shows each transition."""
        before, self.state = self.state, state
        if state is before:
            return
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if state is TrainingState.FORWARD:
            self._range = begin_range("forward", self.name)
        elif state is TrainingState.BACKWARD_PRE:
            self._range = begin_range("backward", self.name)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("rank %d, %s: %s -> %s", own_rank(), self.name, before.name, state.name)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that have the unit's hooks."""
        return tuple(self.module) if isinstance(self.module, ModuleGroup) else (self.module,)

    @property
    def everyone(self) -> tuple[Communicator, Communicator]:
        """The communicators that together, used in this order, reach all ranks with a part of the unit."""
        return self.comm, self.replicas

    @property
    def borrowed_handles(self) -> list[FlatParamHandle]:
        """The handles of parameters that this unit uses and another unit took."""
        return [one.handle for one in self.shares if self in one.members[1:]]

    @property
    def visible_handles(self) -> list[FlatParamHandle]:
        """The handles that this unit runs, and handles run by other units whose parameters its modules use."""
        shared = [handle for one in self.shares for handle in one.holder.handles if handle is one.handle]
        return list(dict.fromkeys([*self.handles, *shared]))

    def __getstate__(self) -> dict[str, Any]:
        forgotten: dict[str, Any] = {
            "runtime": None,
            "backward": UnitBackward(),
            "yet_to_run": NO_MODULES,
            "policy": self.policy.of_copy(),
            "requests": {},
            "unfinished_load": None,
            "_range": None,
            # Handles that moved to an outer unit are restored: the outer unit may not be copied.
            "_incomplete_handles": list(self.owned_handles),
            "shares": [one for one in self.shares if self in one.members],
        }
        return {name: value for name, value in self.__dict__.items() if name != "handles"} | forgotten

    def wake(self) -> None:
        """Complete the handles of a copied or unpickled unit, if all modules of the unit are complete."""
        handles = self.__dict__.get("_incomplete_handles")
        if handles is None or any("places" not in handle.__dict__ for handle in handles):
            return  # units that share a parameter are copied recursively
        places = [place for handle in handles for used in handle.places for place in used]
        if all("_parameters" in place.module.__dict__ for place in places):
            self.handles = self.__dict__.pop("_incomplete_handles")
            for handle in self.handles:
                self.attach(handle)
                handle.wake()

    def ensure_runtime(self) -> UnitRuntime:
        """Return the runtime. A unit without one that runs is outermost, because inner units' hooks run later."""
        if self.runtime is None:
            self.runtime = self._new_runtime(self)
        return self.runtime

    def request(self, kind: type[_Request]) -> _Request | None:
        """Return the running request of a kind (see `state_requests`) on this unit's state; None if there is none."""
        return self.requests.get(kind)

    def end_load(self) -> None:
        """Shard the parameters that a load left unsharded because an exception ended the load."""
        if self.unfinished_load is not None:
            self.unfinished_load()

    def end_left_forward(self) -> None:
        """Recover after an exception that no hook reported, for example `KeyboardInterrupt`."""
        if self.runtime is not None:
            self.runtime.end_left_forward()

    def require_idle(self, what: str) -> None:
        """Raise RuntimeError during a forward or backward; end an aborted load."""
        self.end_load()
        if self.runtime is not None:
            self.runtime.ensure_idle(what)

    @property
    def holds_nothing(self) -> bool:
        """Return whether all parameters of the modules belong to other units."""
        return not (self.visible_handles or self.owned_handles or self.wanted)

    def withdraw(self) -> None:
        """Restore the module, because it could not be wrapped or another unit takes over.

        Raises:
            RuntimeError: during a forward or backward.
        """
        if self.runtime is not None:
            self.runtime.forget()
        for hook in self.hooks:
            hook.remove()
        for module in own_modules(self.module):
            for name in ("_apply", "requires_grad_", "named_parameters"):
                found = module.__dict__.get(name)
                if getattr(getattr(found, "__self__", found), "unit", None) is self:  # this, or a method of this
                    del module.__dict__[name]
        self.buffers.widen()
        for module in {self.module, *self.modules}:
            del module.__dict__[_ATTRIBUTE]

    def on_gradient(self, handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
        """Hook of the handle: the gradient of a leaf is complete."""
        for notify in self.observers.gradient:
            if leaf.grad is not None and leaf.grad.layout is torch.strided:  # others are refused
                notify(handle, slot, leaf.grad)
        if self.state in (TrainingState.IDLE, TrainingState.FORWARD) and self.runtime is not None:
            self.runtime.ensure_backward()  # used outside of its unit's forward, or in a backward during it
        # Checked at the first gradient of a backward. If parameters are sharded, this gradient did not read them.
        is_first = handle.phase is Phase.UNSHARDED and not handle.gradients.has_arrived
        if is_first and handle.shard_state != handle.state_in_use:
            raise changed_before_backward(self)
        if handle.take_gradient(slot, leaf) and self.runtime is not None:
            self.runtime.gradient_complete(self, handle)

    def take_assigned_gradients(self) -> None:
        """Take gradients assigned by user code to unsharded parameters, for which autograd calls no hook."""
        for handle in self.handles:
            for slot, leaf in enumerate(handle.unsharded.leaves):
                if leaf.grad is not None:
                    handle.take_gradient(slot, leaf)

    def add_handle(self, shard: Shard, reduce_comm: Communicator, kept_shard: KeptShard | None) -> None:
        """Run a flat parameter's shard. Gradients of replicated flat parameters are summed over all ranks."""
        precision = self.precision_at(shard.places[0])
        if shard.is_replicated:
            handle = FlatParamHandle(shard, LONE_RANK, LONE_RANK, self.comm, precision, self.policy, self.comm)
        else:
            comms = self.comm, reduce_comm, self.replicas
            handle = FlatParamHandle(shard, *comms, precision, self.policy, self.axes[1], kept_shard)
        self.attach(handle)
        self.handles.append(handle)
        self.owned_handles.append(handle)

    def attach(self, handle: FlatParamHandle) -> None:
        """Set the handle's unit name, policy and callback to those of this unit."""
        handle.unit_name = self.name
        handle.policy, handle.on_gradient = self.policy, self.on_gradient

    def adopt(self, handle: FlatParamHandle) -> None:
        """Run a handle that another unit ran."""
        self.attach(handle)
        self.handles.append(handle)

    def give_up(self, handle: FlatParamHandle) -> None:
        """Stop running a handle, which another unit then runs."""
        handle.free()
        self.handles.remove(handle)
        self.backward.missing.discard(handle)

    def precision_at(self, places: Sequence[ParamInfo]) -> Precision:
        """Return the dtypes for a parameter used at these places."""
        if self._kept and any(place.module in self._kept for place in places):
            return self.precision.without_casts()
        return self.precision.in_own_dtype() if self.uncast and places[0][:2] in self.uncast else self.precision

    def places(self) -> Iterator[ParamInfo]:
        """Yield the places where the original parameters of this unit are used."""
        for handle in self.handles:
            for places in handle.places:
                yield from places

    @property
    def mode(self) -> str:
        """The mode of the module, as the user set it."""
        return "train()" if self.modules[0].training else "eval()"

    @property
    def has_frozen_handle(self) -> bool:
        return any(map(_has_frozen, self.handles))

    @property
    def contains_units(self) -> bool:
        return any(unit_of(module) not in (None, self) for module in self.module.modules())

    @property
    def is_lent(self) -> bool:
        """Return whether the modules compute with tensors passed for a single call."""
        if not lenders:
            return False
        # A unit without parameters takes part if any unit inside does.
        units = [self] if self.handles else units_of(self.module.modules())
        handle = None
        for unit in units:
            for handle in unit.handles:
                if not handle.presentation.is_lent:
                    return False
        return handle is not None

    @property
    def is_in_use(self) -> bool:
        """Return whether any parameter is unsharded, or its all-gather is in flight."""
        phases = list(map(_phase_of, self.handles))
        return phases.count(Phase.SHARDED) < len(phases)

    @property
    def is_incomplete(self) -> bool:
        """Return whether any parameter is not unsharded, or its shard has changed since the all-gather."""
        return any(handle.phase is not Phase.UNSHARDED or not handle.is_unsharded for handle in self.handles)

    @property
    def is_unsharding(self) -> bool:
        return Phase.UNSHARDING in map(_phase_of, self.handles)

    def rename(self, name: str) -> None:
        self.name = name
        for number, handle in enumerate(self.handles):
            handle.rename(name, name if len(self.handles) == 1 else f"{name} (flat parameter {number})")

    def unshard(self) -> None:
        self.is_spare = False
        for handle in self.handles:
            handle.unshard()

    def wait_for_unshard(self) -> None:
        for handle in self.handles:
            handle.wait_for_unshard()
        for notify in self.observers.unshard:
            notify(self)

    def settle(self) -> None:
        """Block until the shards may be written."""
        for handle in self.handles:
            handle.settle()

    def reshard(self, *, is_needed: bool = False) -> None:
        for notify in self.observers.reshard:
            notify(self)
        for handle in self.handles:
            handle.free(is_needed=is_needed)

    def release(self) -> None:
        """Free all parameters except the shards."""
        for handle in self.handles:
            handle.release()

    def read_ahead(self) -> None:
        """Begin to read from disk the shards, which are unsharded after the next unit."""
        for handle in self.handles:
            handle.storage.read_ahead()

    def enter(self) -> None:
        """Record that a module is about to compute; a group is resharded after all of its modules have computed."""
        if isinstance(self.module, ModuleGroup) and not self.yet_to_run:
            self.yet_to_run = frozenset(self.module)

    @property
    def frees_after_forward(self) -> bool:
        """Return whether the unit is resharded after a forward."""
        is_root = self.runtime is not None and self.runtime.root is (self.policy.part_of or self)
        return self.policy.reshard_after_forward and not (is_root and self.policy.keeps_as_root)

    @property
    def references(self) -> int:
        """Return how many tensors refer to the memory of the unsharded parameters."""
        return sum(map(_references_of, self.handles))

    @property
    def frees_after_backward(self) -> bool:
        """Return whether a backward reshards the unit; while gradients accumulate, only if a forward does as well."""
        return self.policy.reshard_after_backward and (
            self.policy.sync is not GradientSync.NONE or self.frees_after_forward
        )

    def begin_backward(self) -> None:
        sync = self.policy.sync
        if sync is GradientSync.SHARDS and self.axes[1].world_size == 1:
            sync = GradientSync.FULL  # without replicas, there is no reason to hold them
        for handle in self.handles:
            handle.begin_backward(sync)
        self.backward.begin(self.trained_handles)  # which may have changed since the forward

    def expect_gradients(self) -> None:
        """Expect gradients again: backward reaches the unit again (re-entrant checkpoint, output found late)."""
        self.backward.missing = set(self.trained_handles)

    @property
    def trained_handles(self) -> list[FlatParamHandle]:
        return list(filter(_requires_grad, self.handles))

    def set_divide_factors(self, pre: float, post: float) -> None:
        """Use these divisors from now on, also for accumulated gradients.

        Raises:
            RuntimeError: if a communication hook is registered.
        """
        if (hook := self.policy.comm_hook) is not None:
            raise RuntimeError(
                f"{self.name}: the communication hook {hook.name} divides gradients by itself. Change the divisor in "
                "the hook, for example through its state."
            )
        for handle in self.handles:
            handle.gradients.rescale(self.policy.predivide / pre)
        self.policy.predivide, self.policy.postdivide = float(pre), float(post)

    def connect(self, way: Callable[[FlatParamHandle], tuple[Communicator, Communicator]]) -> None:
        """All-gather and reduce over other communicators with the same ranks.

        Args:
            way: returns the communicators to all-gather and to reduce over, for a handle with sharded parameters.
        """
        for handle in self.handles:
            if handle.is_sharded:
                handle.connect(*way(handle), handle.replicas, handle.replica_axis)

    @property
    def was_written(self) -> bool:
        """True if modules or users have written values to unsharded parameters that the shards do not have."""
        return any(map(_was_written, self.handles))

    def forget_written(self) -> None:
        """Ignore values written to the unsharded parameters until now."""
        for handle in self.handles:
            if handle.unsharded.written():
                handle.forget_written()


_has_frozen = operator.attrgetter("has_frozen")
_requires_grad = operator.attrgetter("requires_grad")
_phase_of = operator.attrgetter("phase")
_was_written = operator.attrgetter("was_written")


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that runs `module`; None if no unit does."""
    return module.__dict__.get(_ATTRIBUTE)


def units_of(modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that run these modules, without duplicates."""
    return list(dict.fromkeys(filter(None, map(unit_of, modules))))


def outermost_units(module: nn.Module) -> Iterator[Unit]:
    """Yield the outermost units of a tree, without duplicates."""
    seen: set[nn.Module] = set()
    ahead = [module]
    while ahead:
        current = ahead.pop()
        if current not in seen:
            seen.add(current)
            unit = unit_of(current)
            if unit is not None:
                yield unit
            else:
                ahead += reversed(list(current.children()))


def unit_of_wrapper(module: nn.Module) -> Unit | None:
    """Return the unit of a `FullyShardedDataParallel`; None for any other module."""
    unit = getattr(module, "__dict__", {}).get("_unit")
    return unit if isinstance(unit, Unit) else None


def changed_before_backward(unit: Unit) -> RuntimeError:
    """Return the error for a backward through a unit whose shards have changed since the forward."""
    return RuntimeError(
        f"{unit.name}: its parameters were changed (by an optimizer step, a cast, fsdp.park, or summon_full_params() "
        "without volatile=True?) between forward and backward, so gradients would belong to neither the old nor the "
        "new values. Run backward before the change, or forward again after it."
    )


_references_of = operator.attrgetter("unsharded.references")


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a tree, outer before inner, except modules that run in inner units."""
    found: dict[nn.Module, None] = {}
    ahead, own = [module], (None, unit_of(module))
    while ahead:
        current = ahead.pop()
        if current not in found and (current is module or unit_of(current) in own):
            found[current] = None
            ahead += [inner for inner in reversed([*current._modules.values()]) if inner is not None]
    return list(found)


def units_in(root: Unit) -> dict[Unit, str]:
    """Return the units of a tree, outer before inner, with the plain names of their modules."""
    found: dict[Unit, list[str]] = {}
    for name, module in named_modules(root.module):
        unit = unit_of(module)
        if unit is not None:
            found.setdefault(unit, []).append(name)
    root_name = f"root ({type(root.module).__name__})"
    return {unit: ", ".join(names) if names[0] else root_name for unit, names in found.items()}
