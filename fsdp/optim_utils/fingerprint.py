"""`fsdp.fingerprint`: a hash of weights, buffers and optimizer state that does not depend on the sharding.

Each rank computes a number from its elements and their positions in the unsharded tensors. The sum of these numbers
modulo 2**64 is the same for any division of the elements among ranks. The sum of each tensor is multiplied by a number
derived from the tensor's name, and the products are added. Unsharded values count once if they are equal on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.communicator import during
from fsdp.distributed.consensus import agree_on, done_by_all, from_everyone
from fsdp.distributed.dtensor import MeshPart, held_part, is_dtensor
from fsdp.engine.names import clean_name
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.fingerprints import fingerprint_of_range, fingerprint_of_rows
from fsdp.layers.state_requests import require_shards
from fsdp.layers.verify import require_sharded
from fsdp.optim_utils.params import Parameters
from fsdp.optim_utils.state import ELEMENTWISE, OptimParam, Original, flat_state, odd_shape, release

_MASK = (1 << 64) - 1
_DOING = "take a fingerprint"


class Part(NamedTuple):
    """The fingerprint of this rank's part of a tensor, or of a value."""

    name: str  # the name of the parameter or buffer
    key: str  # the key in the optimizer's state; empty for the tensor itself
    bits: int
    is_copy: bool = False  # True if other ranks hold the same value, instead of other elements


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """Collective. Return a hash of a model's weights and buffers, and of its optimizer's state, on every rank.

    Equal values have the same hash on any number of ranks. Use this function to compare two trainings with
    `fsdp.SameBits`, or a training with its loaded checkpoint. The hash depends on every bit, and on names, shapes and
    dtypes. Buffers and unsharded parameters count once if they are equal on all ranks.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        optimizer: an optimizer of the model's parameters; `OwnedOptimizer` is supported.

    Returns:
        16 hexadecimal digits.

    Raises:
        TypeError: if the model is not sharded.
        NotImplementedError: for tensor-parallel parameters, and for buffers and state of tensor subclasses.
        ValueError: for optimizer state that is neither a number nor a tensor with the shape of the shard.
        RuntimeError: inside a forward, backward or `summon_full_params`; if ranks pass different optimizers.
    """
    root = require_sharded(model, "fsdp.fingerprint")
    with during("fsdp.fingerprint()"):
        given = "no optimizer" if optimizer is None else type(optimizer).__name__
        agree_on(root.everyone, "arguments of fsdp.fingerprint", given)
        parts = done_by_all([root.everyone], _DOING, lambda: parts_of(model, root, optimizer))
        own = (together(part for part in parts if not part.is_copy), together(part for part in parts if part.is_copy))
        heard = from_everyone(root.everyone, own)
    return f"{_combined((part for part, _ in heard), [copy for _, copy in heard]):016x}"


def parts_of(model: nn.Module, root: Unit, optimizer: torch.optim.Optimizer | None = None) -> list[Part]:
    """Return this rank's parts of all weights and buffers of a model, and of its optimizer's state."""
    require_shards(units_in(root), _DOING)
    for unit in units_in(root):
        for handle in unit.handles:
            handle.absorb()
    params = Parameters(model, root)
    refuse_tensor_parallel(params, "fsdp.fingerprint")
    named = ((clean_name(name), buffer) for name, buffer in model.named_buffers())
    buffers = [Part(name, "", _of_value(buffer, f"the buffer {name}"), is_copy=True) for name, buffer in named]
    found = [*weights_of(params), *buffers, *(() if optimizer is None else state_of(params, optimizer))]
    release(params.listed)
    return found


def refuse_tensor_parallel(params: Parameters, what: str) -> None:
    """Raise NotImplementedError for tensor-parallel parameters, because ranks outside the call hold parts of them."""
    for one, original in params.by_number.values():
        part = MeshPart.of(one.param) if one.handle is None else original.part
        if part is not None and not part.data_dims.issuperset(part.sharded_dims):
            raise NotImplementedError(
                f"{what}: {original.name} is tensor-parallel, but ranks with other parts do not take part in this "
                "call. Load a checkpoint of fsdp.save into a model without tensor parallelism, and compare that model."
            )


def weights_of(params: Parameters, of_gradients: bool = False) -> Iterator[Part]:
    """Yield this rank's parts of weights, or of gradients, which have the same layout."""
    for one, original in params.by_number.values():
        value = one.param.grad if of_gradients else one.param
        if value is not None:
            yield Part(original.name, "", _of_elements(one, original, value), _is_copied(one))


def state_of(params: Parameters, optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """Yield this rank's parts of an optimizer's state.

    State that is not elementwise is read on the rank that holds the parameter's first element.
    """
    for one, original in params.stepped_by(optimizer).by_number.values():
        kept = one.interval(original, one.comm.rank)
        if kept is None or _is_integer(one):  # steps do not use state of integers, and some forms keep none
            continue
        for key, value in flat_state(optimizer.state.get(one.param, {})).items():
            is_tensor = isinstance(value, Tensor) and (value.dim() > 0 or is_dtensor(value))
            if is_tensor and value.shape == one.param.shape:
                bits = _of_elements(one, original, value)
            elif is_tensor and not one.is_owned:
                wanted = f"this rank's shard of it {tuple(one.param.shape)}"
                raise ValueError(odd_shape(key, original.name, value.shape, wanted, ELEMENTWISE))
            else:
                whose = f"the optimizer's state '{key}' of {original.name}"
                bits = _of_value(value, whose) if one.replicas.rank == kept.start == 0 else 0
            yield Part(original.name, key, bits, _is_copied(one))


def _is_copied(one: OptimParam) -> bool:
    return one.handle is None or one.handle.is_local


def _is_integer(one: OptimParam) -> bool:
    return not (one.param.is_floating_point() or one.param.is_complex())


def _of_elements(one: OptimParam, original: Original, like: Tensor) -> int:
    """Return the fingerprint of this rank's elements of an original; `like` has the layout of `one.param`."""
    kept = one.interval(original, one.comm.rank)
    if kept is None or one.replicas.rank:
        return 0
    local = held_part(like) if is_dtensor(like) else like
    elements = local.detach().as_subclass(Tensor).reshape(-1)[kept.offset : kept.offset + kept.numel]
    packing = None if one.handle is None else one.handle.flat_param.packings[original.slot]
    dtype, shape = (like.dtype, original.shape) if packing is None else (packing.dtype, packing.shape)
    start = kept.start
    if _is_integer(one):  # as bytes, because packed parameters may be divided within an element
        elements, start = elements.unsqueeze(-1).view(torch.uint8), start * like.element_size()
    layout = None if one.handle is None else one.handle.layout
    if isinstance(layout, RowsLayout) and not one.is_owned and (dim := layout.slots[original.slot].dim):
        rows = elements.view(*layout.local_shape(original.slot, one.comm.rank), *elements.shape[1:])
        first, total = layout.rows(original.slot, one.comm.rank)[0], layout.slots[original.slot].shape[dim]
        bits = fingerprint_of_rows(rows, dim, first, total)
    else:
        bits = fingerprint_of_range(elements, start)
    return text_bits(f"{dtype} {tuple(shape)}") * bits


def _of_value(value: Any, whose: str) -> int:
    """Return the fingerprint of a value that is complete on this rank; `whose` is its name in messages."""
    if not isinstance(value, Tensor):
        return text_bits(repr(value))
    if type(value := value.detach()) is not Tensor or value.layout is not torch.strided:
        kind = f"{value.layout} tensor" if type(value) is Tensor else type(value).__name__
        raise NotImplementedError(f"{whose} is a {kind}, whose bits cannot be read")
    return text_bits(f"{value.dtype} {tuple(value.shape)}") * fingerprint_of_range(value, 0)


def merged(by_rank: Sequence[Sequence[Part]]) -> dict[tuple[str, str], int]:
    """Return the fingerprint of each tensor or value by name and key, from the parts of all ranks."""
    every: dict[tuple[str, str], list[Part]] = {}
    for parts in by_rank:
        for part in parts:
            every.setdefault((part.name, part.key), []).append(part)
    found = {}
    for names, parts in every.items():
        copies = [part.bits for part in parts if part.is_copy]
        found[names] = _combined((part.bits for part in parts if not part.is_copy), copies)
    return found


def _combined(parts: Iterable[int], copies: Sequence[int]) -> int:
    """Add the fingerprints of all ranks; copies count once if they are equal."""
    same = copies[0] if len(set(copies)) == 1 else text_bits(str(copies)) if copies else 0
    return (sum(parts) + same) & _MASK


def together(parts: Iterable[Part]) -> int:
    """Combine parts into a single fingerprint; the fingerprints of multiple ranks can be added."""
    return sum(text_bits(f"{part.name} {part.key}") * part.bits for part in parts) & _MASK


def text_bits(text: str) -> int:
    """Return an odd number derived from a text, a factor that distinguishes the fingerprints of different tensors."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1
