"""A `TensorProtocol` flattens tensors of a class into plain tensors, and creates such tensors again.

Most tensor subclasses implement torch's protocol, ``__tensor_flatten__`` and ``__tensor_unflatten__``. The 4-bit
weights of bitsandbytes (``Params4bit``) do not: their data is a single tensor, with the scales in a separate object.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn


class TensorProtocol:
    """The protocol of classes with torch's two methods."""

    has_value_dtype = True  # `dtype` is the dtype of the values, and not of their storage

    def flatten(self, tensor: Any) -> tuple[dict[str, Any], Any]:
        """Return the inner tensors by name, and the metadata of the tensor."""
        names, metadata = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}, metadata

    def inner(self, tensor: Any, name: str) -> Any:
        """Return the inner tensor of this name, or None."""
        return getattr(tensor, name, None)

    def unflatten(self, kind: Any, inner: dict[str, Any], metadata: Any, *shape_and_stride: Any) -> Any:
        """Return a tensor of the class around inner tensors."""
        return kind.__tensor_unflatten__(inner, metadata, *shape_and_stride)

    def joined(self, value: Any, state_dict: dict[str, Any], name: str) -> Any:
        """Return a value joined with the entries under its name in a state dict; the entries are removed."""
        return value

    def detach_from(self, module: nn.Module) -> None:
        """Remove data of the parameter, which is sharded now, from its module."""


class QuantStateProtocol(TensorProtocol):
    """The protocol of ``Params4bit``: the data, and the tensors of the ``quant_state``, which may be nested.

    The names of inner tensors are paths, such as ``quant_state.absmax``.
    """

    has_value_dtype = False

    def flatten(self, tensor: Any) -> tuple[dict[str, Any], Any]:
        if tensor.quant_state is None:
            raise ValueError("it is not quantised yet, which module.to(device) does")
        inner: dict[str, Any] = {_DATA: tensor.detach().as_subclass(Tensor)}
        return inner, {_STATE: _take_apart(tensor.quant_state, _STATE, inner), "storage": tensor.quant_storage}

    def inner(self, tensor: Any, name: str) -> Any:
        path = () if name == _DATA else name.split(".")
        return reduce(lambda found, each: getattr(found, each, None), path, tensor)

    def unflatten(self, kind: Any, inner: dict[str, Any], metadata: Any, *_: Any) -> Any:
        made: Any = Tensor._make_subclass(kind, inner[_DATA], False)
        state = _put_together(metadata[_STATE])
        own = {name: getattr(state, name) for name in ("blocksize", "quant_type")}
        own |= {"compress_statistics": state.nested, "quant_storage": metadata["storage"], "bnb_quantized": True}
        vars(made).update(own, quant_state=state, module=None)
        for path in inner.keys() - {_DATA}:
            *owners, name = path.split(".")
            value = inner[path]
            if value.is_meta and value.dim() == 0:  # the layer reads this number for its state dict
                value = torch.zeros_like(value, device="cpu")
            setattr(reduce(getattr, owners, made), name, value)
        return made

    def joined(self, value: Any, state_dict: dict[str, Any], name: str) -> Any:
        start = f"{name}."  # bitsandbytes saves the scales of a weight under its name, and does not load them
        beside = {key.removeprefix(start): state_dict.pop(key) for key in list(state_dict) if key.startswith(start)}
        if not beside or type(value) is not Tensor:
            return value
        from bitsandbytes.nn import Params4bit

        return Params4bit.from_prequantized(value, beside, device=value.device)

    def detach_from(self, module: nn.Module) -> None:
        own = vars(module)
        if own.get(_STATE) is not None:
            own[_STATE] = None  # the scales of the whole weight; a forward reads them from the weight
        if "support_avx512bf16_for_cpu" in own:
            own["support_avx512bf16_for_cpu"] = False  # otherwise a forward in evaluation converts the weight in place


_DATA, _STATE = "data", "quant_state"


def _take_apart(state: Any, path: str, inner: dict[str, Any]) -> dict[str, Any]:
    """Return the class and the plain values of a quantisation state; add its tensors to `inner`, by path."""
    values: dict[str, Any] = {}
    for name, value in sorted(vars(state).items()):
        if isinstance(value, Tensor):
            inner[f"{path}.{name}"] = value
        else:
            values[name] = _take_apart(value, f"{path}.{name}", inner) if isinstance(value, type(state)) else value
    return {_CLASS: type(state), **values}


def _put_together(values: dict[str, Any]) -> Any:
    made = object.__new__(values[_CLASS])
    for name in values.keys() - {_CLASS}:
        value = values[name]
        setattr(made, name, _put_together(value) if isinstance(value, dict) else value)
    return made


_CLASS = "class"
_TORCHS, _BITSANDBYTES = TensorProtocol(), QuantStateProtocol()


def protocol_of(kind: type) -> TensorProtocol | None:
    """Return the protocol of a class of tensors, or None if the class has none."""
    if hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__"):
        return _TORCHS
    is_4_bit = kind.__name__ == "Params4bit" and kind.__module__.partition(".")[0] == "bitsandbytes"
    return _BITSANDBYTES if is_4_bit else None
