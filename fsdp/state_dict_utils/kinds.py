"""What the leaves of state trees are: tensors, plain values, and whatever is only carried along.

A leaf counts as a tensor if its elements lie in memory one by one, so that they can be cut, sent and written: a dense
tensor of a dtype that torch copies, a plain subclass of one, a `DTensor` around one. All other tensors (sparse,
quantised, nested ones, wrappers of other tensors) are, like objects of unknown types, not looked into.
"""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.dtensor import arrived, is_dtensor, local_part
from fsdp.state_dict_utils.tree_copy import is_wrapper, missing_memory

PLAIN_LEAVES = (int, float, complex, str, bytes, io.BytesIO, type(None))


@dataclass(frozen=True)
class TensorInfo:
    """What a rank must know of a tensor that will arrive."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor, or stands for one, whose elements can be cut, sent and written."""
    return isinstance(leaf, TensorInfo) or (isinstance(leaf, Tensor) and _special(leaf) is None)


def why_unknown(leaf: Any) -> str | None:
    """Why a leaf is only carried along; None for a tensor and a plain value."""
    if isinstance(leaf, Tensor):
        if (special := _special(leaf)) is None:
            return None
        return (
            f"a tensor {special[0]}, and only strided (dense) ones are known. {special[1]}, take it out of the tree, "
            "or pass type_check=False."
        )
    if isinstance(leaf, (TensorInfo, *PLAIN_LEAVES)):
        return None
    return (
        f"a {type(leaf).__name__} is neither a container (a mapping, list or tuple) nor a tensor, number, str, bytes, "
        "io.BytesIO or None. Take it out of the tree, or pass type_check=False."
    )


def _special(tensor: Tensor) -> tuple[str, str] | None:
    """What is special about a tensor whose elements do not lie in memory one by one, and what to do about it."""
    local = arrived(local_part(tensor))
    if local.is_nested:
        return "that is nested", "Take it apart with unbind()"
    if local.layout is not torch.strided:
        return f"of layout {local.layout}", "Convert it with to_dense()"
    if local.is_quantized:
        return f"of quantised {local.dtype}", "Convert it with dequantize(), or take int_repr() and its scales"
    if is_wrapper(local):
        return f"of the class {type(local).__name__}, which wraps others", "Put the tensors into the tree that it wraps"
    if not casts(local.dtype, local.dtype):
        return f"of {local.dtype}, which torch cannot copy", "View it as torch.uint8"
    return None


@cache
def casts(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether values of one dtype can be stored in another one without losing their kind."""
    if not torch.can_cast(source, target):
        return False
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except RuntimeError:  # torch has no kernel for it
        return False
    return True


def described(value: Any) -> str:
    """A node as messages have it. Leaves that are only carried along are alike if this is."""
    if not isinstance(value, (Tensor, TensorInfo)):
        return "None" if value is None else type(value).__name__
    kind = "DTensor" if is_dtensor(value) else "tensor"
    if isinstance(value, Tensor) and (special := _special(value)) is not None:
        kind += f" {special[0]}"
        if value.is_nested:
            return f"{kind}, of {str(value.dtype).removeprefix('torch.')}"
    return f"{kind} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def without_values(tensor: Tensor) -> str | None:
    """Why a tensor cannot be read; None if it can."""
    if tensor.is_meta:
        return "on the meta device, where there are no values"
    missing = missing_memory(arrived(local_part(tensor))) if is_tensor(tensor) else None
    return f"without its memory: {missing}" if missing else None


def not_writable(tensor: Tensor) -> str | None:
    """Why nothing can be written into a tensor that is not on the meta device; None if it can."""
    local = local_part(tensor)
    if local.numel() and any(step == 0 and size > 1 for size, step in zip(local.shape, local.stride(), strict=True)):
        return "several elements of the target lie in one place (it was expanded): clone() it"
    return missing_memory(local)


def own_copy(leaf: Any) -> Any:
    """Of a leaf that is no tensor; what cannot change is its own copy.

    Raises:
        TypeError: if it cannot be copied.
    """
    try:
        if isinstance(leaf, io.BytesIO):
            return io.BytesIO(leaf.getvalue())
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            return (
                leaf.detach().clone().requires_grad_(leaf.requires_grad)
            )  # torch's deepcopy does not know all of them
        return leaf if isinstance(leaf, PLAIN_LEAVES) else copy.deepcopy(leaf)
    except Exception as error:
        raise TypeError(cannot(leaf, "be copied", error)) from error


def cannot(leaf: Any, what: str, error: Exception) -> str:
    """What to say of a leaf that is only carried along, and cannot be."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)  # torch's go on with a list of all kernels
    return f"a {described(leaf)} cannot {what}: {reason}. Take it out of the tree."
