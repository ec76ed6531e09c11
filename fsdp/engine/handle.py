"""`FlatParamHandle` keeps one flat parameter sharded, shows it whole, and takes in its gradients.

The tensors of a handle, for W ranks (P is the layout's padded number of elements):

- ``flat_param`` ``[P / W]``, in the parameters' own dtype: this rank's shard, the only thing that lives between steps
  and all that the optimizer sees. Registered in modules, so `parameters()` finds it. Its ``storage``
  says where it lives.
- ``unsharded.full`` ``[P]``, in the dtype of the computation and on its device: the gathered parameters, see
  `UnshardedParameters`. What is gathered is a shard that was cast and moved just in time, and is freed afterwards.
  In the rows layout they are copied there from what was gathered, which is freed at once.
- ``gradients`` ``[P]``, in the dtype of the reduction; the reduced gradient is of the shard's.

In a world of one ``full`` is the shard itself, and stays, unless the shard is of another dtype or elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import LONE_RANK, Communicator, Pending
from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.errors import InternalError
from fsdp.engine.flat_param import FlatParameter, ParamInfo, SharedParamInfo
from fsdp.engine.grad_buffer import GradientBuffer
from fsdp.engine.handle_changes import FollowsChanges
from fsdp.engine.handle_gradients import TakesGradients
from fsdp.engine.handle_state import Phase
from fsdp.engine.labels import label
from fsdp.engine.orig_params import NewPieces
from fsdp.engine.post_forward_shard import PostForwardShard
from fsdp.engine.precision import Precision
from fsdp.engine.registration import Registry
from fsdp.engine.unsharded_params import UnshardedParameters

_LEGAL = {
    Phase.SHARDED: (Phase.UNSHARDING,),
    Phase.UNSHARDING: (Phase.UNSHARDED, Phase.SHARDED),
    Phase.UNSHARDED: (Phase.SHARDED,),
}


class FlatParamHandle(TakesGradients, FollowsChanges):
    """Runs one flat parameter: shards it, shows it whole, and takes in its gradients.

    It knows how, and nothing of when: which collectives happen in which order is the runtime's.

    Args:
        flat_param: this rank's shard (`FlatParameter.shard_of`).
        infos: for each of its parameters, the places where it is used, first the one that names it.
        comm, reduce_comm: the ranks to gather from, and to reduce over.
        replicas: the ranks that hold the same shard, over which what was reduced is summed.
        registered: the modules, with the name, that are to list `flat_param` among their parameters.
        precision: the dtypes of computation and reduction.
        on_gradient: called with the handle, a parameter's number and its leaf when autograd has finished that gradient.
        post_forward_comm: the ranks that keep it together between forward and backward; see `PostForwardShard`.
        new_pieces: makes this rank's pieces of the original parameters, which are listed in their places instead.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        infos: Sequence[Sequence[ParamInfo]],
        comm: Communicator,
        reduce_comm: Communicator,
        replicas: Communicator,
        registered: Sequence[tuple[nn.Module, str]],
        precision: Precision,
        on_gradient: Callable[[FlatParamHandle, int, Tensor], None],
        new_pieces: NewPieces | None = None,
        post_forward_comm: Communicator | None = None,
    ) -> None:
        self.flat_param = flat_param
        self.storage = flat_param.shard_storage
        self.post_forward_shard = None
        if post_forward_comm is not None and post_forward_comm.world_size > 1:
            self.post_forward_shard = PostForwardShard(post_forward_comm)
        self.fingerprints, flat_param.fingerprints = flat_param.fingerprints, None
        self.connect(comm, reduce_comm, replicas)
        self.layout = flat_param.make_layout(self.comm.world_size)
        self.name, self._unit_name = "", "its unit"
        self.phase = Phase.SHARDED
        self.pieces = None if new_pieces is None else new_pieces(flat_param, self.layout, comm.rank, infos)
        self.places = [list(places) for places in infos]
        entries: list[tuple[nn.Module, str, nn.Parameter]] = [(*place, flat_param) for place in registered]
        if self.pieces is not None:
            entries = self.pieces.entries
        self.registry = Registry(self.places, entries, looks=self)
        self._precision = precision
        self._in_full_precision = False
        self._on_gradient = on_gradient
        self.number = self.tag = self.reduce_tag = self.replica_tag = 0
        flat_param._is_managed = True
        self.gradients = self._new_gradients()
        self._build()

    @property
    def param_infos(self) -> list[ParamInfo]:
        """Of each parameter the place that names it."""
        return [places[0] for places in self.places]

    @property
    def shared_param_infos(self) -> list[SharedParamInfo]:
        """All other places."""
        return [SharedParamInfo(*place, primary=places[0]) for places in self.places for place in places[1:]]

    def use_at(self, places: Sequence[ParamInfo]) -> None:
        """Have its only parameter seen and listed in more places, where nothing is now."""
        self.reshard()
        self.places[0] += places
        for unsharded in self._unsharded_by_dtype.values():
            unsharded.use_at(0, places)
        self.registry.add(places, self.flat_param if self.pieces is None else self.pieces.params[0])
        self.fill_places()

    @property
    def precision(self) -> Precision:
        """The dtypes of computation and reduction."""
        return self._precision

    def report_to(self, on_gradient: Callable[[FlatParamHandle, int, Tensor], None]) -> None:
        """Have gradients announced there from now on."""
        self._on_gradient = on_gradient

    def connect(self, comm: Communicator, reduce_comm: Communicator, replicas: Communicator) -> None:
        """Gather from, reduce over, and then sum over these ranks."""
        if self.flat_param.make_layout().numel == 0:
            comm = reduce_comm = replicas = LONE_RANK  # there is nothing to say to other ranks
        self.comm, self.reduce_comm, self.replicas = comm, reduce_comm, replicas

    def number_as(self, number: int) -> None:
        """Be known under this number, and take tags; all ranks that it talks to do so in the same order."""
        self.number, self.tag, self.replica_tag = number, self.comm.new_tag(), self.replicas.new_tag()
        self.reduce_tag = self.tag if self.reduce_comm is self.comm else self.reduce_comm.new_tag()
        if self.post_forward_shard is not None:
            self.post_forward_shard.tag = self.post_forward_shard.comm.new_tag()

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = ("gradients", "unsharded", "_unsharded_by_dtype", "_pending", "_built_for", "_on_gradient")
        kept = {name: value for name, value in self.__dict__.items() if name not in rebuilt}
        return kept | {"phase": Phase.SHARDED, "_gathered": None}

    def wake(self) -> None:
        """After it was copied or unpickled, with the modules it is for: build what was left behind."""
        shard = self.flat_param
        shard.shard_storage, shard._is_managed = self.storage, True
        self.storage.adopt(shard)
        if self.pieces is not None:
            self.pieces.alias()
        self.registry.wake(self)
        self.gradients = self._new_gradients()
        self._build()

    def rename(self, name: str, unit: str) -> None:
        """Go by this name, as one of those of `unit`, in messages."""
        self.name, self._unit_name = name, unit
        for unsharded in self._unsharded_by_dtype.values():
            unsharded.name_unit(unit)

    # --- buffers ------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make everything beside the shard anew, for its present dtype and the present device."""
        shard = self.flat_param
        self._built_for = (shard.dtype, self.requires_grad_each, shard.data_ptr(), self.storage.device)
        self.has_frozen = not all(self.requires_grad_each)
        if self.gradients.fits(self._precision.reduce_dtype(shard.dtype), shard.dtype, self.storage.device):
            self.gradients.expect(self.requires_grad_each)  # frozen or thawed in the middle of an accumulation
        else:
            self.gradients = self._new_gradients()
        if self._precision.keeps_low_gradients:
            for param in (shard, *self.registry.params):
                param.grad_dtype = None  # any
        self._unsharded_by_dtype: dict[torch.dtype, UnshardedParameters] = {}
        self._gathered = None
        self._choose_unsharded()

    def _new_gradients(self) -> GradientBuffer:
        own = self.flat_param.dtype
        dtype, needs = self._precision.reduce_dtype(own), self.requires_grad_each
        return GradientBuffer(self.layout, dtype, own, self.storage.device, needs)

    def _choose_unsharded(self) -> None:
        if self.dtype not in self._unsharded_by_dtype:
            self._unsharded_by_dtype[self.dtype] = self._new_unsharded()
            self._unsharded_by_dtype[self.dtype].name_unit(self._unit_name)
        self.unsharded = self._unsharded_by_dtype[self.dtype]
        self.unsharded.fill_places(is_unsharded=False)

    @torch.inference_mode(False)  # or what is first needed in inference could not be used in training
    def _new_unsharded(self) -> UnshardedParameters:
        shard = self.flat_param
        is_shard = not self.is_sharded and self.dtype == shard.dtype and not self.storage.is_elsewhere
        return UnshardedParameters(
            self.layout,
            self.places,
            shard.parts,
            shard.vector if is_shard else self._new_buffer(self.dtype, self._unsharded_numel),
            is_shard=is_shard,
            requires_grad=self.requires_grad_each,
            valueless=self.valueless,
            attributes=shard.attributes,
            on_gradient=self._leaf_has_gradient,
            lent=self.registry.lent,
            absent=self.pieces.absent if self.pieces is not None else None,
        )

    def present(self, slot: int) -> Tensor:
        """What modules see of a parameter in this phase."""
        return self.unsharded.front(slot, self.phase is Phase.UNSHARDED)

    def is_own(self, slot: int, value: Any) -> bool:
        """Whether modules may have seen this of a parameter."""
        kinds = self._unsharded_by_dtype.values()
        return any(
            value is unsharded.front(slot, is_unsharded) for unsharded in kinds for is_unsharded in (True, False)
        )

    def lendable(self, slot: int, tensor: Tensor) -> Tensor:
        """What modules can compute with of a tensor that takes the place of a parameter for one call.

        Raises:
            RuntimeError: if it is not of the parameter's shape, as this rank's part is not.
        """
        name, part = self.layout.slots[slot].name, self.flat_param.parts[slot]
        shape = self.layout.slots[slot].shape if part is None else part.shape
        if tensor.shape != shape or (part is None and is_dtensor(tensor)):
            raise RuntimeError(
                f"{name} of {self._unit_name} was given a {type(tensor).__name__} of shape {tuple(tensor.shape)} to "
                f"compute with (by torch.func.functional_call?): give a whole, ordinary tensor of shape {tuple(shape)} "
                "under the original parameter's name. Inside `with model.summon_full_params():` the model lists such."
            )
        return tensor.to(self.dtype) if self.is_cast and tensor.dtype == self.flat_param.dtype else tensor

    @property
    def _unsharded_numel(self) -> int:
        numel = self.layout.unsharded_numel
        return numel if self.post_forward_shard is None else self.post_forward_shard.padded(numel)

    def _new_buffer(self, dtype: torch.dtype, numel: int) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.storage.device)

    def compute_in_full(self, wanted: bool) -> None:
        """Whether to gather the parameters in the shard's own dtype from now on."""
        if wanted is self._in_full_precision or not self.is_cast:
            return
        self.absorb()
        self.reshard()
        self._in_full_precision = wanted
        self._choose_unsharded()

    # --- unshard and reshard ------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        if phase not in _LEGAL[self.phase]:
            raise InternalError(
                f"rank {self.comm.rank}, {self.name}: {self.phase.name} -> {phase.name} is not a legal step"
            )
        self.phase = phase

    @property
    def is_unsharded(self) -> bool:
        """Whether the whole parameter is here, and as the shard is now."""
        return self.unsharded.is_shard or (self.phase is Phase.UNSHARDED and self.shard_state == self._gathered)

    def unshard(self) -> None:
        """Start to fetch the whole parameter; nothing happens if it is here or on its way."""
        if self.is_exposed:
            raise RuntimeError(
                f"{self.name}: another unit that shares its parameter is inside summon_full_params() or a load. Leave "
                "it first, or summon the outermost wrapper instead."
            )
        if self.phase is Phase.UNSHARDING:
            return
        self.absorb()
        if self.phase is Phase.UNSHARDED:
            if self.shard_state == self._gathered:
                return
            self.reshard()  # the shard was changed since: what is here is stale
        self.follow_shard()
        self.storage.check(self.name)
        self._gathered = self.shard_state
        if self.unsharded.is_shard:
            self.storage.read_ahead()
        elif self.post_forward_shard is not None and self.post_forward_shard.has(self._gathered):
            self._pending = self.post_forward_shard.gather(self.unsharded.begin_gather(directly=True), self.name)
        else:
            self._pending = self._gather_into(self.unsharded.begin_gather())
        self._enter(Phase.UNSHARDING)  # if that did not raise

    def _gather_into(self, full: Tensor) -> Pending:
        if not self.storage.is_elsewhere:
            return self._exchange(full)
        copy_stream = self.storage.copy_stream
        with copy_stream.fork():
            pending = self._exchange(full)
        return pending.after(copy_stream.arrival())

    def _exchange(self, full: Tensor) -> Pending:
        if self.is_sharded or full.dtype != self.flat_param.dtype:
            shard = self.storage.staged(self.flat_param, full.dtype)
        else:
            shard = self.flat_param.vector  # copied to its place directly
        with label("all_gather", self._unit_name):
            return self.comm.all_gather(full, shard, f"all-gather of {self.name}", self.tag)

    def wait_for_unshard(self) -> None:
        """Whole and visible in the modules when this returns (on CUDA: for work on the current stream)."""
        self.unshard()
        if self.phase is Phase.UNSHARDING:
            if not self.unsharded.is_shard:
                with label("all_gather_wait", self._unit_name):
                    self._pending.wait()
                    self.unsharded.end_gather()
                self.storage.release()
            self.check_places()
            self.unsharded.show()
            self._enter(Phase.UNSHARDED)

    def reshard(self, *, keeps_post_forward_shard: bool = False) -> None:
        """Give the memory of the whole parameter back.

        Args:
            keeps_post_forward_shard: backward will need it: if there are ranks to keep it among, do so.
        """
        if self.post_forward_shard is not None:
            if keeps_post_forward_shard and self.phase is Phase.UNSHARDED and not self.unsharded.is_shard:
                self.post_forward_shard.keep(self.unsharded.full, self._gathered)
            else:
                self.post_forward_shard.forget()
        if self.phase is Phase.SHARDED:
            return
        if self.phase is Phase.UNSHARDED:
            self.unsharded.hide()
        if self.unsharded.is_shard:
            self.storage.release()
        elif self.phase is Phase.UNSHARDING:
            self._pending.wait()  # it is written to until that is done
            self.unsharded.end_gather(is_wanted=False)
        self.unsharded.free()
        self._enter(Phase.SHARDED)

    def gathered(self) -> Tensor:
        """Collective. A buffer of its own with the whole parameter, in the shard's dtype."""
        full = self._new_buffer(self.flat_param.dtype, self.layout.padded_numel)
        self._gather_into(full).wait()
        self.storage.release()
        return full

    def serve_gather(self) -> None:
        """Take part in a gather that only other ranks need; what is here stays as it is."""
        if self.is_sharded:
            self.absorb()
            self.follow_shard()
            self.storage.check(self.name)
            self._gather_into(self._new_buffer(self.dtype, self.layout.padded_numel)).wait()
            self.storage.release()

    def settle(self) -> None:
        """Block until the shard may be written: what was sent and copied from it has arrived."""
        self.comm.settle()
        self.storage.copy_stream.settle()

    def _leaf_has_gradient(self, slot: int, leaf: Tensor) -> None:
        self._on_gradient(self, slot, leaf)
