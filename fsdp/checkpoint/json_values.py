"""Values in a checkpoint other than tensors, stored as JSON: numbers, strings, containers and small tensors.

Types that JSON cannot distinguish are written as an object with a single key that begins with ``~``. Reading executes
no code, unlike a pickle.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdp.checkpoint.safetensors import DTYPES, KINDS
from fsdp.checkpoint.untrusted import readable, short
from fsdp.distributed.devices import byte_view

_TUPLE, _DICT, _TENSOR, _BYTES, _FLOAT = "~tuple", "~dict", "~tensor", "~bytes", "~float"
_COUNTER = "~counter"
MAX_TENSOR_BYTES = 1 << 20


def encoded(value: Any, where: str) -> Any:
    """Return a value in a form that `json.dumps` supports.

    Args:
        value: None, a bool, number, string, bytes, a list, tuple or dict of such values, or a tensor of at most 1 MiB.
            Tensors are restored on the CPU. Instances of subclasses are restored as instances of the base class, except
            `collections.Counter`, whose methods torch's `MultiStepLR` uses. NumPy's numbers are restored as Python's.
        where: the name of the value in messages.

    Raises:
        TypeError: for any other object; the message names its position.
    """
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, (list, tuple)):
        items = [encoded(each, f"{where}[{number}]") for number, each in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, dict):
        pairs = [(key, encoded(each, f"{where}[{key!r}]")) for key, each in value.items()]
        if isinstance(value, Counter):
            return {_COUNTER: [[encoded(key, f"a key of {where}"), each] for key, each in pairs]}
        if all(isinstance(key, str) and not key.startswith("~") for key in value):
            return {str(key): each for key, each in pairs}
        return {_DICT: [[encoded(key, f"a key of {where}"), each] for key, each in pairs]}
    if isinstance(value, Tensor):
        return {_TENSOR: _encoded_tensor(value, where)}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}: besides the model and the optimizer, a "
        "checkpoint contains only None, numbers, strings, bytes, lists, tuples, dicts and small tensors. Save its "
        "contents instead."
    )


def _encoded_tensor(value: Tensor, where: str) -> list[Any]:
    if type(value := value.detach()) is not Tensor or value.dtype not in KINDS or value.layout is not torch.strided:
        raise TypeError(
            f"{where} is a {type(value).__name__} of {value.dtype} and {value.layout}, which cannot be saved"
        )
    if value.nbytes > MAX_TENSOR_BYTES:
        raise TypeError(
            f"{where} is a tensor of {value.nbytes} bytes: the values of a checkpoint are small (at most "
            f"{MAX_TENSOR_BYTES} bytes each). Register it as a buffer of the model."
        )
    flat = byte_view(value.cpu().resolve_conj().resolve_neg().contiguous())
    return [KINDS[value.dtype], list(value.shape), base64.b64encode(flat.numpy().tobytes()).decode()]


def decoded(value: Any) -> Any:
    """Return the value from its encoded form; ValueError for a form that `encoded` never returns."""
    try:
        return _decoded(value)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if len(value) != 1 or not kind.startswith("~"):
        return {key: _decoded(each) for key, each in value.items()}
    content = value[kind]
    try:
        if kind in (_TUPLE, _DICT, _COUNTER) and not isinstance(content, list):
            raise TypeError("no list")
        if kind == _TUPLE:
            return tuple(map(_decoded, content))
        if kind in (_DICT, _COUNTER):
            pairs = {_decoded(key): _decoded(each) for key, each in content}
            return pairs if kind == _DICT else Counter(pairs)
        if kind == _FLOAT:
            return float(content)
        if kind == _BYTES:
            return base64.b64decode(content)
        if kind == _TENSOR:
            name, shape, text = content
            data = bytearray(base64.b64decode(text))
            flat = (
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            return flat.view(DTYPES[name]).view(shape)
    except RecursionError:
        raise
    except (TypeError, ValueError, KeyError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{kind} has {short(content, 40)}: {readable(str(error), 500)}") from None
    raise ValueError(f"unknown kind of value {short(kind)}: saved by a newer version")
