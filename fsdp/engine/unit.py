"""A unit: one wrapped module, its handles, and its state.

A unit knows its modules and parameters; the runtime decides when they are unsharded and resharded.
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
from fsdp.engine.names import clean_name
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

# Where a module keeps its unit. On the module, so that both die together and are copied together.
_ATTRIBUTE = "_fsdp_unit"

NO_MODULES: frozenset[nn.Module] = frozenset()  # one for all units: each empty set is an object of 216 bytes

_Request = TypeVar("_Request")

_log = logging.getLogger(__name__)


class TrainingState(Enum):
    """A unit is in one of these states; the names are FairScale's."""

    IDLE = auto()  # between its computations
    FORWARD = auto()  # its module's forward is running
    BACKWARD_PRE = auto()  # backward has reached its outputs; its parameters are unsharded
    BACKWARD_POST = auto()  # its gradients are complete; the backward of others goes on
    SUMMON_FULL_PARAMS = auto()  # its modules hold unsharded parameters as ordinary ones


class UnitRuntime(Protocol):
    """The part of a `Runtime` that its units and their hooks report to."""

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
    """A parameter of a unit's module that another unit has taken, and does not share yet."""

    handle: FlatParamHandle
    owner: Unit  # it took the parameter
    places: Places  # in the module of the one that wants it


@dataclass(eq=False)
class Share:
    """A handle whose parameter the modules of several units use."""

    handle: FlatParamHandle
    members: list[Unit]  # those that use it, first the one that took it
    holder: Unit  # the one that runs the handle now

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"holder": self.members[0]}  # a copy may be of a part of the model only


class ModuleGroup(nn.ModuleList):
    """Modules that are one unit together, and have no module around them that is theirs alone."""


class _HandlesOfCopy:
    """A copied unit has no `handles` of its own, but incomplete ones, until all of its modules are there."""

    def __get__(self, unit: Unit, _: type[Unit]) -> Any:
        unit.wake()
        return unit.__dict__["handles" if "handles" in unit.__dict__ else "_incomplete_handles"]


class Unit:
    """The parameters of one wrapped module that no inner unit took, or of a group of modules.

    Args:
        module: gets the hooks; of a `ModuleGroup`, each module in it.
        placements: where its parameters, gradients and optimizer state are between uses.
        comm: the ranks that share the parameters.
        replicas: the ranks that hold the same shards as this one, and sum gradients with it.
        axes: the ranks along the shard axis and the replica axis.
        ranks: the numbers of all that its gradients are summed over, as far as torch knows them.
        precision: the dtypes that it computes in.
        device: where it computes.
        ignored: modules and parameters inside that it leaves alone.
        policy: the settings that users make, which may change later.
        settings: options by their names, of which it needs no more than that all ranks have the same.
        new_runtime: makes the runtime of a tree whose outermost unit is given.
    """

    # Hidden by the attribute of an instance. A `__getattr__` would make all attributes slow.
    handles: list[FlatParamHandle] = cast(Any, _HandlesOfCopy())
    observers: Observers = NONE
    unfinished_load: Callable[[], None] | None = None  # ends a load, also one that was given up
    uncast: Collection[tuple[nn.Module, str]] = ()  # the places of parameters that a policy leaves in their own dtype
    _range: record_function | None = None  # that a profiler shows of its present state

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
        # Before our own hooks, which then run around those that keep a module's precision.
        casting = kept if precision.is_mixed else {}
        self.hooks: list[Any] = [hook for outermost in casting for hook in compute_in_own_dtype(outermost)]
        self.precision = precision.without_casts() if module in self._kept else precision
        self.requests: dict[type[Any], Any] = {}  # the operations on its state that are running; see `request`
        self.buffers = Buffers([inner for inner in ours if inner not in self._kept], precision.buffers)
        self.handles = []  # those that it runs, one for each flat parameter
        self.owned_handles: list[FlatParamHandle] = []  # of the parameters that it took, whoever runs them
        self.wanted: list[Wanted] = []  # parameters of its module that another unit took
        self.shares: list[Share] = []  # parameters that it uses together with other units, or runs for them
        self.policy = policy
        self.settings = settings
        self.name = type(module).__name__
        self.state = TrainingState.IDLE
        self.runtime: UnitRuntime | None = None
        self.is_spare = False  # it is unsharded only because nothing has resharded it, not at a user's request
        self.backward = UnitBackward()
        self._new_runtime = new_runtime
        for each in (module, *self.modules):
            each.__dict__[_ATTRIBUTE] = self
        self.yet_to_run = NO_MODULES  # the modules of a group that this forward has not come to

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
        """The modules that it runs around."""
        return tuple(self.module) if isinstance(self.module, ModuleGroup) else (self.module,)

    @property
    def everyone(self) -> tuple[Communicator, Communicator]:
        """The communicators over which, one after the other, all ranks are reached that hold a part of it."""
        return self.comm, self.replicas

    @property
    def borrowed_handles(self) -> list[FlatParamHandle]:
        """The handles of parameters that it uses and another unit took."""
        return [one.handle for one in self.shares if self in one.members[1:]]

    @property
    def visible_handles(self) -> list[FlatParamHandle]:
        """The handles that it runs, and those that others run and its modules use."""
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
            # Handles that moved to a unit around it are back: that unit may not be copied.
            "_incomplete_handles": list(self.owned_handles),
            "shares": [one for one in self.shares if self in one.members],
        }
        return {name: value for name, value in self.__dict__.items() if name != "handles"} | forgotten

    def wake(self) -> None:
        """Complete the handles of a copied or unpickled unit, if all of its modules are there by now."""
        handles = self.__dict__.get("_incomplete_handles")
        if handles is None or any("places" not in handle.__dict__ for handle in handles):
            return  # units that share a parameter are copied from within each other
        places = [place for handle in handles for used in handle.places for place in used]
        if all("_parameters" in place.module.__dict__ for place in places):
            self.handles = self.__dict__.pop("_incomplete_handles")
            for handle in self.handles:
                self.attach(handle)
                handle.wake()

    def ensure_runtime(self) -> UnitRuntime:
        """Return the runtime. A unit that has none and runs is the outermost: hooks of inner ones run later."""
        if self.runtime is None:
            self.runtime = self._new_runtime(self)
        return self.runtime

    def request(self, kind: type[_Request]) -> _Request | None:
        """Return the request of a kind (see `state_requests`) under which its state is; None if there is none."""
        return self.requests.get(kind)

    def end_load(self) -> None:
        """Shard the parameters that a load has left unsharded, because an exception ended it."""
        if self.unfinished_load is not None:
            self.unfinished_load()

    def end_left_forward(self) -> None:
        """Come to rest after an exception that no hook has seen, such as `KeyboardInterrupt`."""
        if self.runtime is not None:
            self.runtime.end_left_forward()

    def require_idle(self, what: str) -> None:
        """Raise RuntimeError inside a forward or backward; end a load that was given up."""
        self.end_load()
        if self.runtime is not None:
            self.runtime.ensure_idle(what)

    @property
    def holds_nothing(self) -> bool:
        """Return whether all parameters of its modules are other units'."""
        return not (self.visible_handles or self.owned_handles or self.wanted)

    def withdraw(self) -> None:
        """Leave the module as it was found: it could not be wrapped, or another unit takes over.

        Raises:
            RuntimeError: in the middle of a forward or backward.
        """
        if self.runtime is not None:
            self.runtime.forget()
        for hook in self.hooks:
            hook.remove()
        for module in own_modules(self.module):
            for name in ("_apply", "requires_grad_", "named_parameters"):
                found = module.__dict__.get(name)
                if getattr(getattr(found, "__self__", found), "unit", None) is self:  # itself, or a method of it
                    del module.__dict__[name]
        self.buffers.widen()
        for module in {self.module, *self.modules}:
            del module.__dict__[_ATTRIBUTE]

    def on_gradient(self, handle: FlatParamHandle, slot: int, leaf: Tensor) -> None:
        """Hook of the handle: a leaf has its gradient."""
        for notify in self.observers.gradient if leaf.grad is not None else ():
            notify(handle, slot, leaf.grad)
        if self.state in (TrainingState.IDLE, TrainingState.FORWARD) and self.runtime is not None:
            self.runtime.ensure_backward()  # of a parameter that was used outside of its unit's forward, or inside
        # For the first gradient of a backward. Where parameters are sharded, computing it has read none of them.
        is_first = handle.phase is Phase.UNSHARDED and not handle.gradients.has_arrived
        if is_first and handle.shard_state != handle.state_in_use:
            raise changed_before_backward(self)
        if handle.take_gradient(slot, leaf) and self.runtime is not None:
            self.runtime.gradient_complete(self, handle)

    def take_assigned_gradients(self) -> None:
        """Take gradients that a user's code has assigned to unsharded parameters, for which autograd calls no hook."""
        for handle in self.handles:
            for slot, leaf in enumerate(handle.unsharded.leaves):
                if leaf.grad is not None:
                    handle.take_gradient(slot, leaf)

    def add_handle(self, shard: Shard, reduce_comm: Communicator, kept_shard: KeptShard | None) -> None:
        """Run a flat parameter's shard. Gradients of one that is replicated are summed over all ranks."""
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
        """Give a handle the settings and the callback of the unit that runs it."""
        handle.unit_name = self.name
        handle.policy, handle.on_gradient = self.policy, self.on_gradient

    def adopt(self, handle: FlatParamHandle) -> None:
        """Run a handle that another unit ran."""
        self.attach(handle)
        self.handles.append(handle)

    def give_up(self, handle: FlatParamHandle) -> None:
        """Leave it to another unit to run this handle."""
        handle.free()
        self.handles.remove(handle)
        self.backward.missing.discard(handle)

    def precision_at(self, places: Sequence[ParamInfo]) -> Precision:
        """The dtypes for a parameter that is used at these places."""
        if self._kept and any(place.module in self._kept for place in places):
            return self.precision.without_casts()
        return self.precision.in_own_dtype() if self.uncast and places[0][:2] in self.uncast else self.precision

    def places(self) -> Iterator[ParamInfo]:
        """Yield the places where its original parameters are used."""
        for handle in self.handles:
            for places in handle.places:
                yield from places

    @property
    def mode(self) -> str:
        """The mode of its module, as users set it."""
        return "train()" if self.modules[0].training else "eval()"

    @property
    def has_frozen_handle(self) -> bool:
        return any(map(_has_frozen, self.handles))

    @property
    def contains_units(self) -> bool:
        return any(unit_of(module) not in (None, self) for module in self.module.modules())

    @property
    def is_lent(self) -> bool:
        """Return whether its modules compute with tensors that were given for one call alone."""
        if not lenders:
            return False
        # A unit without parameters takes part if a unit inside of it does.
        units = [self] if self.handles else units_of(self.module.modules())
        handle = None
        for unit in units:
            for handle in unit.handles:
                if not handle.presentation.is_lent:
                    return False
        return handle is not None

    @property
    def is_in_use(self) -> bool:
        """Return whether any of its parameters are unsharded, or on their way."""
        phases = list(map(_phase_of, self.handles))
        return phases.count(Phase.SHARDED) < len(phases)

    @property
    def is_incomplete(self) -> bool:
        """Return whether any of its parameters are not there to compute with, or of a shard that has changed since."""
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
        """Block until its shards may be written."""
        for handle in self.handles:
            handle.settle()

    def reshard(self, *, is_needed: bool = False) -> None:
        for notify in self.observers.reshard:
            notify(self)
        for handle in self.handles:
            handle.free(is_needed=is_needed)

    def release(self) -> None:
        """Free all parameters but the shards."""
        for handle in self.handles:
            handle.release()

    def read_ahead(self) -> None:
        """Begin to read shards from disk, which are unsharded after the next unit."""
        for handle in self.handles:
            handle.storage.read_ahead()

    def enter(self) -> None:
        """Note that one of its modules is about to compute; it is resharded when all of a group have."""
        if isinstance(self.module, ModuleGroup) and not self.yet_to_run:
            self.yet_to_run = frozenset(self.module)

    @property
    def frees_after_forward(self) -> bool:
        """Return whether it is resharded after a forward."""
        is_root = self.runtime is not None and self.runtime.root is (self.policy.part_of or self)
        return self.policy.reshard_after_forward and not (is_root and self.policy.keeps_as_root)

    @property
    def references(self) -> int:
        """Return how many tensors have the memory of its unsharded parameters."""
        return sum(map(_references_of, self.handles))

    @property
    def frees_after_backward(self) -> bool:
        """Return whether it is resharded after a backward; while gradients accumulate, only if it is after forward."""
        return self.policy.reshard_after_backward and (
            self.policy.sync is not GradientSync.NONE or self.frees_after_forward
        )

    def begin_backward(self) -> None:
        sync = self.policy.sync
        if sync is GradientSync.SHARDS and self.axes[1].world_size == 1:
            sync = GradientSync.FULL  # there is nothing to hold them for
        for handle in self.handles:
            handle.begin_backward(sync)
        self.backward.begin(self.trained_handles)  # which may have changed since the forward

    def expect_gradients(self) -> None:
        """Expect gradients anew: a backward comes to it again, by a re-entrant checkpoint or an output found late."""
        self.backward.missing = set(self.trained_handles)

    @property
    def trained_handles(self) -> list[FlatParamHandle]:
        return list(filter(_requires_grad, self.handles))

    def set_divide_factors(self, pre: float, post: float) -> None:
        """Divide by these from now on, accumulated gradients included.

        Raises:
            RuntimeError: if a communication hook is registered.
        """
        if (hook := self.policy.comm_hook) is not None:
            raise RuntimeError(
                f"{self.name}: the communication hook {hook.name} divides gradients by itself. Change the divisor "
                "there, for instance by numbers in its state."
            )
        for handle in self.handles:
            handle.gradients.rescale(self.policy.predivide / pre)
        self.policy.predivide, self.policy.postdivide = float(pre), float(post)

    def connect(self, way: Callable[[FlatParamHandle], tuple[Communicator, Communicator]]) -> None:
        """All-gather and reduce over other communicators with the same ranks.

        Args:
            way: returns those to all-gather and to reduce over, for a handle whose parameters are sharded.
        """
        for handle in self.handles:
            if handle.is_sharded:
                handle.connect(*way(handle), handle.replicas, handle.replica_axis)

    @property
    def was_written(self) -> bool:
        """True if modules or users have written to its unsharded parameters values that the shards do not have."""
        return any(map(_was_written, self.handles))

    def forget_written(self) -> None:
        """Ignore values that were written to its weights until now."""
        for handle in self.handles:
            if handle.unsharded.written():
                handle.forget_written()


_has_frozen = operator.attrgetter("has_frozen")
_requires_grad = operator.attrgetter("requires_grad")
_phase_of = operator.attrgetter("phase")
_was_written = operator.attrgetter("was_written")


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that runs `module`, None if it is no unit's."""
    return module.__dict__.get(_ATTRIBUTE)


def units_of(modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that run these modules, each once."""
    return list(dict.fromkeys(filter(None, map(unit_of, modules))))


def outermost_units(module: nn.Module) -> Iterator[Unit]:
    """Yield the outermost units in a tree, each once."""
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
    """Return the error of a backward through a unit whose shards have changed since its forward."""
    return RuntimeError(
        f"{unit.name}: its parameters were changed (by an optimizer step, a cast, fsdp.park, or summon_full_params() "
        "without volatile=True?) between forward and backward, so gradients would belong to neither the old nor the "
        "new values. Run backward before the change, or forward again after it."
    )


_references_of = operator.attrgetter("unsharded.references")


def own_modules(module: nn.Module) -> list[nn.Module]:
    """The modules of a tree, outer before inner, without those that run in units inside of it."""
    found: dict[nn.Module, None] = {}
    ahead, own = [module], (None, unit_of(module))
    while ahead:
        current = ahead.pop()
        if current not in found and (current is module or unit_of(current) in own):
            found[current] = None
            ahead += [inner for inner in reversed([*current._modules.values()]) if inner is not None]
    return list(found)


def units_in(root: Unit) -> list[tuple[str, Unit]]:
    """The units of a tree with the plain names of their modules, outer before inner."""
    found: dict[Unit, list[str]] = {}
    for name, module in root.module.named_modules():
        unit = unit_of(module)
        if unit is not None:
            found.setdefault(unit, []).append(clean_name(name))
    root_name = f"root ({type(root.module).__name__})"
    return [(", ".join(names) if names[0] else root_name, unit) for unit, names in found.items()]
