"""`FlatParamHandle` keeps one flat parameter sharded, shows it whole, and takes in its gradients.

The tensors of a handle, for W ranks (P is the layout's padded number of elements):

- ``flat_param`` ``[P / W]``, in the parameters' own dtype: this rank's shard, the only thing that lives between steps
  and all that the optimizer sees. Registered in modules, so `parameters()` finds it. Its ``home`` says where it lives.
- ``whole.full`` ``[P]``, in the dtype of the computation and on its device: the gathered parameters, see
  `WholeParameters`. What is gathered is a shard that was cast and moved just in time, and is freed after the gather.
- ``gradients`` ``[P]``, in the dtype of the reduction; the reduced gradient is of the shard's.

In a world of one ``full`` is the shard itself, and stays, unless the shard is of another dtype or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fsdp._collect import text_of_key
from fsdp._comm import LONE_RANK, Communicator, Pending
from fsdp._errors import InternalError
from fsdp._flat_param import FlatParameter, ParamInfo, SharedParamInfo
from fsdp._gradients import GradientBuffer
from fsdp._handle_gradients import TakesGradients
from fsdp._layout import Interval
from fsdp._offload import Home
from fsdp._pieces import Pieces
from fsdp._precision import Precision
from fsdp._registry import Registry
from fsdp._whole import WholeParameters


class Phase(Enum):
    """What is true of a handle's gathered buffer."""

    SHARDED = auto()  # it has no memory; modules see placeholders
    GATHERING = auto()  # allocated, the all-gather is in flight; nobody may read it
    FULL = auto()  # whole and valid; modules see the leaves


_LEGAL = {
    Phase.SHARDED: (Phase.GATHERING,),
    Phase.GATHERING: (Phase.FULL, Phase.SHARDED),
    Phase.FULL: (Phase.SHARDED,),
}


class FlatParamHandle(TakesGradients):
    """Runs one flat parameter: shards it, shows it whole, and takes in its gradients.

    It knows how, and nothing of when: which collectives happen in which order is the runtime's.

    Args:
        flat_param: this rank's shard (`FlatParameter.shard_of`).
        infos: for each of its parameters, the places where it is used, first the one that names it.
        comm, reduce_comm: the ranks to gather from, and to reduce over.
        registered: the modules, with the name, that are to list `flat_param` among their parameters.
        precision: the dtypes of computation and reduction.
        on_gradient: called with the handle, a parameter's number and its leaf when autograd has finished that gradient.
        original: have this rank's pieces of the original parameters listed in their places instead.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        infos: Sequence[Sequence[ParamInfo]],
        comm: Communicator,
        reduce_comm: Communicator,
        registered: Sequence[tuple[nn.Module, str]],
        precision: Precision,
        on_gradient: Callable[[FlatParamHandle, int, Tensor], None],
        original: bool = False,
    ) -> None:
        self.flat_param = flat_param
        self.home: Home = flat_param.home
        self.param_infos = [places[0] for places in infos]
        self.shared_param_infos = [
            SharedParamInfo(*place, primary=places[0]) for places in infos for place in places[1:]
        ]
        if flat_param.make_layout().numel == 0:
            comm = reduce_comm = LONE_RANK  # there is nothing to say to other ranks
        self.comm, self.reduce_comm = comm, reduce_comm
        self.layout = flat_param.make_layout(comm.world_size)
        self.name = ""
        self.phase = Phase.SHARDED
        self.pieces = Pieces(flat_param, self.layout, comm.rank, infos) if original else None
        self.places = [list(places) for places in infos]
        entries = [(module, name, flat_param) for module, name in registered]
        self.registry = Registry(self.places, self.pieces.entries if self.pieces is not None else entries)
        self._precision = precision
        self._in_full_precision = False
        self._on_gradient = on_gradient
        self.tag = 0  # distinct on its communicator once the ranks have agreed on a plan
        flat_param._is_managed = True
        self._build()

    # --- what it is ---------------------------------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold a part of it."""
        return self.comm.world_size > 1

    @property
    def requires_grad(self) -> bool:
        return self.flat_param.requires_grad

    @property
    def requires_grad_each(self) -> list[bool]:
        """Of each parameter."""
        if self.pieces is not None:
            return self.pieces.requires_grad
        return [self.flat_param.requires_grad] * len(self.layout.slots)

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        own = self.flat_param.dtype
        return own if self._in_full_precision else self._precision.compute_dtype(own)

    @property
    def is_cast(self) -> bool:
        """Whether it is computed with in another dtype than the optimizer steps it in."""
        return self._precision.compute_dtype(self.flat_param.dtype) != self.flat_param.dtype

    @property
    def shard_state(self) -> Hashable:
        """Changes when the shard is written, cast, moved, frozen or released."""
        shard = self.flat_param
        return shard._version, shard.data_ptr(), shard.dtype, shard.device, *self.requires_grad_each

    @property
    def intervals(self) -> list[Interval]:
        """What this rank holds: shard metadata in the layout's terms."""
        return self.layout.intervals(self.comm.rank)

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the whole gradient as it is sent."""
        return self.layout.padded_numel * self.gradients.dtype.itemsize

    def describe(self) -> str:
        """All that the ranks must agree on, as text."""
        slots = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in self.layout.slots)
        kind = f"{self.flat_param.dtype} requires_grad={self.requires_grad}"
        if self.is_cast or self.gradients.dtype != self.flat_param.dtype:
            computed = self._precision.compute_dtype(self.flat_param.dtype)
            kind += f" computed in {computed}, reduced in {self.gradients.dtype},"
        if self.flat_param.group is not None:
            kind += f" of group {text_of_key(self.flat_param.group)}"
        return f"{kind} over {self.layout.world_size} ranks by {type(self.comm).__name__}: {slots}"

    # --- buffers ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make everything beside the shard anew, for its present dtype and the present device."""
        shard = self.flat_param
        self._built_for = (shard.dtype, self.requires_grad_each, shard.data_ptr(), self.home.device)
        needs = self.requires_grad_each
        self.has_frozen = not all(needs)
        dtypes = self._precision.reduce_dtype(shard.dtype), shard.dtype
        if hasattr(self, "gradients") and self.gradients.fits(*dtypes, self.home.device):
            self.gradients.expect(needs)  # frozen or thawed in the middle of an accumulation
        else:
            self.gradients = GradientBuffer(self.layout, *dtypes, self.home.device, needs)
        self._wholes: dict[torch.dtype, WholeParameters] = {}
        self._gathered: Hashable = None
        self._choose_whole()

    def _choose_whole(self) -> None:
        if self.dtype not in self._wholes:
            self._wholes[self.dtype] = self._new_whole()
        self.whole = self._wholes[self.dtype]
        self.whole.fill_places(is_whole=False)

    @torch.inference_mode(False)  # or what is first needed in inference could not be used in training
    def _new_whole(self) -> WholeParameters:
        shard = self.flat_param
        is_shard = not self.is_sharded and self.dtype == shard.dtype and not self.home.is_elsewhere
        return WholeParameters(
            self.layout,
            self.places,
            shard.detach() if is_shard else self._new_buffer(self.dtype),
            is_shard=is_shard,
            requires_grad=self.requires_grad_each,
            on_gradient=self._leaf_has_gradient,
        )

    def _new_buffer(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.layout.padded_numel, dtype=dtype, device=self.home.device)

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter's attribute is no longer what we put there."""
        for slot in self.whole.disturbed():
            raise RuntimeError(
                f"{self.name}: {self.layout.slots[slot].name} was replaced while its unit was computing. Change "
                "parameters between steps, or inside `with model.summon_full_params():`."
            )

    def fill_places(self) -> None:
        """Put where the modules look for their parameters what belongs there in this phase, whatever is there."""
        self.whole.fill_places(self.phase is Phase.FULL)

    def absorb(self) -> None:
        """Write to the shard what users have put in the places of parameters, or assigned to ``.data`` of pieces.

        Raises:
            RuntimeError: for what cannot be written; it is left where it is.
        """
        if self.phase is Phase.GATHERING:
            return  # the shard is being sent; `check_places` will report what is new
        slots = list(dict.fromkeys([*self.whole.disturbed(), *self.registry.missing()]))
        written = self.whole.written()
        try:
            for slot in written:
                self.keep(slot, self.whole.leaves[slot])
            for slot in slots:
                self.keep(slot, self.registry.assigned(slot))
        except ValueError as error:
            raise RuntimeError(
                f"{self.name}: a parameter was replaced after wrapping by what cannot be kept: {error}. Assign an "
                "nn.Parameter of the parameter's shape, on every rank."
            ) from None
        if written:
            self.whole.restore(written)
        if slots:
            self.registry.withdraw(slots)
            self.fill_places()
        if self.pieces is not None:
            self.pieces.absorb()

    def keep(self, slot: int, value: nn.Parameter) -> None:
        """Keep this rank's part of what a user has made of a whole parameter.

        Raises:
            ValueError: if it has another shape or `requires_grad`.
        """
        if value.requires_grad is not self.requires_grad_each[slot]:
            raise ValueError(
                f"{self.layout.slots[slot].name} has requires_grad={value.requires_grad} now: set that on the "
                "parameters that the wrapped model lists, not on a new value"
            )
        self.store(slot, value)

    def apply_to_hidden(self, fn: Callable[[Tensor], Tensor]) -> None:
        """What `nn.Module._apply` did to registered parameters, for a shard of which only pieces are registered."""
        if self.pieces is not None:
            shard = self.flat_param
            with torch.no_grad():
                grad = None if shard.grad is None else fn(shard.grad)  # which may ask whose gradient it is
                shard.grad = None
                shard.data = fn(shard)
                shard.grad = grad
            self.pieces.alias()
            self.pieces.show_gradients([0] * len(self.places))

    def compute_in_full(self, wanted: bool) -> None:
        """Whether to gather the parameters in the shard's own dtype from now on."""
        if wanted is self._in_full_precision or not self.is_cast:
            return
        self.absorb()
        self.reshard()
        self._in_full_precision = wanted
        self._choose_whole()

    def check_cast(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError if the shard could not be followed after `fn`."""
        shard = self.flat_param
        cast = fn(torch.empty(0, dtype=shard.dtype, device=shard.device))
        self._precision.check(f"after this cast {self.name}", cast.dtype, shard.requires_grad)

    def follow_shard(self) -> None:
        """Follow a shard that was moved, cast or frozen (`module.to(...)`): buffer and leaves are made anew."""
        shard = self.flat_param
        if shard.numel() != self.layout.shard_numel:
            raise RuntimeError(
                f"{self.name}: the flat parameter's shard has {shard.numel()} elements instead of "
                f"{self.layout.shard_numel}: its .data was replaced by something else. Change parameters inside "
                "`with model.summon_full_params():`."
            )
        self.home.adopt(shard)
        dtype, requires_grad, address, device = self._built_for
        if self.home.device != device:
            self.comm = self.comm.for_device(self.home.device)
            self.reduce_comm = self.reduce_comm.for_device(self.home.device)
        is_another = (shard.dtype, self.requires_grad_each, self.home.device) != (dtype, requires_grad, device)
        if self.pieces is not None and (is_another or shard.data_ptr() != address):
            self.pieces.alias()
        if is_another or (self.whole.is_shard and shard.data_ptr() != address):
            self._precision.check(self.name, shard.dtype, shard.requires_grad)
            self._build()

    # --- unshard and reshard ------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise InternalError(
                f"rank {self.comm.rank}, {self.name}: {self.phase.name} -> {phase.name} is not a legal step"
            )
        self.phase = phase

    def gather(self) -> None:
        """Start to fetch the whole parameter; nothing happens if it is here or on its way."""
        if self.phase is Phase.GATHERING:
            return
        self.absorb()
        self.whole.begin_pass()
        if self.phase is Phase.FULL:
            if self.shard_state == self._gathered:
                return
            self.reshard()  # the shard was changed since: what is here is stale
        if self.pieces is not None:
            self.pieces.forget_zeroed()
        self.follow_shard()
        self.home.check(self.name)
        self._gathered = self.shard_state
        self._enter(Phase.GATHERING)
        if self.whole.is_shard:
            self.home.read_ahead()
        else:
            self.whole.allocate()
            self._pending = self._gather_into(self.whole.full)

    def _gather_into(self, full: Tensor) -> Pending:
        if not self.home.is_elsewhere:
            return self._exchange(full)
        lane = self.home.lane
        with lane.fork():
            pending = self._exchange(full)
        return pending.after(lane.arrival())

    def _exchange(self, full: Tensor) -> Pending:
        if self.is_sharded or full.dtype != self.flat_param.dtype:
            shard = self.home.staged(self.flat_param, full.dtype)
        else:
            shard = self.flat_param.detach()  # copied to its place directly
        return self.comm.all_gather(full, shard, f"all-gather of {self.name}", self.tag)

    def unshard(self) -> None:
        """Whole and visible in the modules when this returns (on CUDA: for work on the current stream)."""
        self.gather()
        if self.phase is Phase.GATHERING:
            if not self.whole.is_shard:
                self._pending.wait()
                self.home.release()
            self.check_places()
            self.whole.show()
            self._enter(Phase.FULL)

    def reshard(self) -> None:
        """Give the memory of the whole parameter back."""
        if self.phase is Phase.SHARDED:
            return
        if self.whole.is_shard:
            self.home.release()
        elif self.phase is Phase.GATHERING:
            self._pending.wait()  # it writes into the buffer until it is done
        else:
            self.whole.hide()
        self.whole.free()
        self._enter(Phase.SHARDED)

    def full_copies(self) -> list[Tensor]:
        """Collective. The whole parameters in the shard's dtype, as tensors with memory of their own."""
        self.home.check(self.name)
        self.absorb()
        is_fresh = self.phase is Phase.FULL and self.shard_state == self._gathered
        if self.dtype == self.flat_param.dtype and (is_fresh or self.whole.is_shard):
            return [leaf.detach().clone() for leaf in self.whole.leaves]
        full = self._new_buffer(self.flat_param.dtype)
        self._gather_into(full).wait()
        self.settle()
        return [view.clone() for view in self.layout.unpack(full)]

    def store(self, slot: int, value: Tensor) -> None:
        """Keep this rank's part of a whole parameter's new value."""
        with torch.no_grad():
            self.layout.shard_of(slot, value, self.flat_param, self.comm.rank)
            # Ranks that keep nothing of this parameter must find the shard changed as the others do, or they would
            # not take part in the next gather.
            increment_version(self.flat_param)

    def settle(self) -> None:
        """Block until the shard may be written: what was sent and copied from it has arrived."""
        self.comm.settle()
        self.home.lane.settle()

    def _leaf_has_gradient(self, slot: int, leaf: Tensor) -> None:
        self._on_gradient(self, slot, leaf)
