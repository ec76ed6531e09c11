"""The unsharded parameters of trained tensor subclasses, which are gathered together as bytes.

Each parameter contributes tensors: its class creates them from this rank's rows (``fsdp_pre_all_gather`` of torch's
FSDP2), or they are the rows of its inner tensors. A single all-gather sends the bytes of all tensors. Each class
creates its leaf from the tensors of all ranks (``fsdp_post_all_gather``). A leaf is created once, and later all-gathers
use the same memory, which is freed in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import held_part, local_part, memory_of
from fsdp.distributed.gather_extension import AFTER, BEFORE, PLAIN, around, inner_of, is_of_values
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.layout import Layout
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.unsharded_params import UnshardedParameters


class Gathered:
    """A parameter's tensors in all-gathers: this rank's tensors, and memory for the tensors of all ranks.

    Args:
        layout, slot: the layout in rows, and the number of the parameter in this layout.
        sharded: the parameter as a `DTensor`.
        device, dtype: of the computation.
        arguments: the arguments of ``fsdp_pre_all_gather``.
    """

    def __init__(
        self, layout: RowsLayout, slot: int, sharded: Tensor, device: torch.device, dtype: torch.dtype, arguments: Any
    ) -> None:
        self._world_size, self._sharded, self._device, self._dtype = layout.world_size, sharded, device, dtype
        self._arguments = arguments
        _, self.shape, self._stride, *_ = arguments
        self._extra = len(layout.slots[slot].shape) - len(self.shape)  # a dimension of multiple inner tensors
        self._dim = max(layout.slots[slot].dim - self._extra, 0)
        self._ranges = [layout.rows(slot, rank) for rank in range(layout.world_size)] if self.shape else [(0, 1)]
        self._full_rows = layout.local_shape(slot, 0)[self._extra :]
        self._sent: list[tuple[torch.Size, torch.dtype]] = []  # of each plain tensor
        self._kinds: list[Tensor | None] = []  # for each tensor from the class, an example if it is a subclass
        self._metadata: Any = None
        self.received: list[Tensor] = []  # the tensors of all ranks, for each plain tensor that is sent

    @property
    def rows(self) -> Any:
        """This rank's rows, as a tensor of their class."""
        return held_part(self._sharded)

    @property
    def title(self) -> str:
        return f"a {type(self.rows).__name__} ({self._sharded.fqn})"  # type: ignore[attr-defined]

    @property
    def has_methods(self) -> bool:
        return hasattr(self.rows, AFTER)

    def send(self) -> list[Tensor]:
        """Return this rank's tensors, plain and contiguous."""
        rows = self.rows if self.rows.device == self._device else self.rows.to(self._device)
        if self.has_methods:
            given = self._from_class(rows)
        else:
            given = [one.to(self._dtype) for one in inner_of(rows)]
        # All ranks must send equal sizes. Shorter rows are padded, if the tensors that are rows can be identified.
        short = [number for number, one in enumerate(given) if one.shape == rows.shape != self._full_rows]
        if len(short) > 1 and len(self.shape) == 1 and self.has_methods:
            raise ValueError(
                f"{BEFORE} of {self.title} returned {len(short)} tensors of {list(rows.shape)}, this rank's rows: all "
                f"ranks must send equal sizes. Pad tensors of rows to {list(self._full_rows)}, the shape on the first "
                "rank."
            )
        given = [self._padded(one) if number in short else one for number, one in enumerate(given)]
        kinds = [None if type(one) in PLAIN else one.new_zeros([0] * one.dim()) for one in given]
        plain = [each for one in given for each in ([one] if type(one) in PLAIN else inner_of(one))]
        sent = [(one.shape, one.dtype) for one in plain]
        if self.received and sent != self._sent:
            raise RuntimeError(
                f"{BEFORE} of {self.title} returned tensors of other shapes or dtypes than in its first call: these "
                "must not change"
            )
        self._sent, self._kinds = sent, kinds
        return [one.detach().contiguous() for one in plain]

    def _from_class(self, rows: Any) -> list[Tensor]:
        before = getattr(rows, BEFORE)
        taken = len(inspect.signature(before).parameters)
        if taken not in (1, 5):
            raise TypeError(
                f"{BEFORE} of {self.title} takes {taken} arguments: it must take "
                "(mesh, outer_size, outer_stride, module, mp_policy), or mesh alone"
            )
        given, self._metadata = before(*self._arguments[:taken])
        given = [given] if isinstance(given, Tensor) else list(given)
        for one in given:
            if type(one) not in PLAIN and not is_of_values(one):
                raise TypeError(
                    f"{BEFORE} of {self.title} returned a {type(one).__name__}: return plain tensors, or tensors of "
                    "classes whose __tensor_flatten__ names plain tensors of their shape and dtype"
                )
        return given

    def _padded(self, rows: Tensor) -> Tensor:
        made = rows.new_zeros(self._full_rows)
        made.narrow(self._dim, 0, rows.shape[self._dim]).copy_(rows)
        return made

    def receive(self, by_rank: Tensor) -> None:
        """Copy the bytes of all ranks, ``[ranks, bytes]``, to the memory of `received`."""
        self.received = self.received or [self._room_for(*sent) for sent in self._sent]
        parts = by_rank.split([shape.numel() * dtype.itemsize for shape, dtype in self._sent], dim=1)
        for tensor, (shape, dtype), of_all in zip(self.received, self._sent, parts, strict=True):
            if self._is_divided(shape):
                for (first, last), own in zip(self._ranges, of_all, strict=True):
                    slices = own.clone().view(dtype).view(shape).narrow(self._dim, 0, last - first)
                    tensor.narrow(self._dim, first, last - first).copy_(slices)
            else:
                tensor.view(self._world_size, -1).view(torch.uint8).copy_(of_all)

    def _is_divided(self, shape: torch.Size) -> bool:
        """Return whether ranks send slices whose order in the unsharded tensor differs from the received order."""
        return self._dim > 0 and shape == self._full_rows

    def _room_for(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a tensor from all ranks, either unsharded or concatenated by rows."""
        if self._is_divided(shape):
            return torch.empty(self.shape, dtype=dtype, device=self._device)
        return torch.empty(self._world_size * shape.numel(), dtype=dtype, device=self._device).view(-1, *shape[1:])

    def make(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the unsharded parameter, and tensors that must be freed together with it, besides `received`."""
        inner: Sequence[Tensor] = ()
        if self.has_methods:
            made, inner = getattr(self.rows, AFTER)(self._outputs, self._metadata, self._dtype)
        else:
            made = around(self.rows, [one.view(-1)[: self.shape.numel()].view(self.shape) for one in self.received])
        if made.shape != self.shape or made.stride() != self._stride:  # includes the padding of the shards
            made = torch.as_strided(made, self.shape, self._stride, 0)
        return made, [each for one in inner for each in (inner_of(one) or [one])]

    def fill(self, leaf: Tensor) -> None:
        """Copy the received values to the unsharded parameter."""
        if self.has_methods:
            getattr(self.rows, AFTER)(self._outputs, self._metadata, self._dtype, out=leaf)

    @cached_property
    def _outputs(self) -> tuple[Tensor, ...]:
        """The tensors of all ranks, in the classes of the sent tensors."""
        left = iter(self.received)
        return tuple(
            next(left) if kind is None else around(kind, [next(left) for _ in inner_of(kind)]) for kind in self._kinds
        )


class ExtendedParameters(UnshardedParameters):
    """Unsharded parameters of tensor subclasses.

    Args:
        flat_param, layout: the flat parameter and its layout, in rows.
        full: a tensor with the compute dtype and device.
        absent: the `DTensor`s with this rank's rows, which modules list while the parameters are sharded.
        modules: the module of each parameter, by the parameter's name.
        mesh, mp_policy: the user's mesh and policy of data parallelism.
        others: see `UnshardedParameters`.
    """

    is_exact = False  # classes may send and return values that differ from the shards

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        full: Tensor,
        *,
        absent: Sequence[Tensor],
        modules: Mapping[str, nn.Module],
        mesh: Any,
        mp_policy: Any,
        **others: Any,
    ) -> None:
        if not isinstance(layout, RowsLayout):
            raise TypeError(f"tensor subclasses need rows, got {type(layout).__name__}")
        # Until the first all-gather, the leaves are not visible to modules.
        full = torch.empty(layout.unsharded_numel, dtype=full.dtype, device=full.device)
        self._memory: list[tuple[Any, int]] = []  # storages that are freed with the parameters, and their sizes
        super().__init__(flat_param, layout, full, absent=absent, **others | {"is_shard": False})
        mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        self._parts, self._params = flat_param.parts, []
        for number, (slot, example) in enumerate(zip(layout.slots, flat_param.examples, strict=True)):
            shape = slot.shape if example is None else slot.shape[len(slot.shape) - example.dim() :]
            stride = torch.empty(shape, device="meta").stride()
            arguments = mesh, shape, stride, modules[slot.name], mp_policy
            self._params.append(Gathered(layout, number, absent[number], full.device, full.dtype, arguments))
        self._are_made = False
        self._arriving: tuple[Tensor, list[int]] | None = None  # the bytes of all ranks, and the sizes of parameters

    def moved(self) -> list[int]:
        return []  # the class of a parameter defines its ``.data``

    # Tensors created during inference may be used in training.
    @torch.inference_mode(False)
    @torch.no_grad()
    def begin_gather(self, *, directly: bool = False) -> Tensor:
        sent = [[one.view(-1).view(torch.uint8) for one in param.send()] for param in self._params]
        self.outgoing = torch.cat([one for each in sent for one in each])
        full = self.outgoing.new_empty(self._layout.world_size * self.outgoing.numel())
        self._arriving = full, [sum(one.numel() for one in each) for each in sent]
        return full

    @torch.inference_mode(False)
    @torch.no_grad()
    def end_gather(self, *, is_wanted: bool = True) -> None:
        arriving, self._arriving, self.outgoing = self._arriving, None, None
        if arriving is None or not is_wanted:
            return
        full, nbytes = arriving
        for storage, size in self._memory:
            storage.resize_(size)
        by_param = full.view(self._layout.world_size, -1).split(nbytes, dim=1)
        for param, of_all in zip(self._params, by_param, strict=True):
            param.receive(of_all)
        if self._are_made:
            for param, leaf in zip(self._params, self.leaves, strict=True):
                param.fill(leaf)
        else:
            self._make_leaves()
        self._freed.unseal()
        self.rest()

    def _make_leaves(self) -> None:
        held, inside = list[Tensor](), dict[int, list[Tensor]]()
        for number, (param, part) in enumerate(zip(self._params, self._parts, strict=True)):
            made, inner = param.make()
            seen = made if part is None else part.shown(made)
            leaf = self.leaves[number] = self._new_leaf(number, seen, self.leaves[number].requires_grad)
            own = [*param.received, *inner]
            inside[id(leaf)] = [*(inner_of(local_part(leaf)) or [local_part(leaf)]), *own]
            held += own
        self._accumulators = None  # they belong to the previous leaves
        storages = {storage.data_ptr(): storage for storage in map(Tensor.untyped_storage, held) if storage.nbytes()}
        self._memory, self._are_made = [(storage, storage.nbytes()) for storage in storages.values()], True
        self._watch(inside)

    def _release(self) -> None:
        super()._release()
        for storage, _ in self._memory:
            storage.resize_(0)

    def holds(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in {storage.data_ptr() for storage, _ in self._memory}

    def differ_from(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=self.full.device)  # the class may have changed the values

    def new_value(self, number: int) -> nn.Parameter:
        if not self._params[number].has_methods:
            return self.leaves[number]
        raise RuntimeError(
            f"{self._layout.slots[number].name} was written to while it was unsharded: the result of its {AFTER} "
            "cannot be written back to the shards. Write to the sharded parameter, between steps."
        )
