"""Tensors without values: they have shape, dtype and device, and raise an error for all operations.

On CPU, a view of a freed storage crashes the interpreter, and an empty tensor instead causes unclear errors. A
placeholder raises an error that names the missing parameter and the remedy.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import local_part
from fsdp.engine.user_attributes import attributes_of, give_attributes


class Placeholder(Tensor):
    """A tensor without values; any operation on it raises `RuntimeError` with the message of the placeholder.

    Args:
        like: the tensor whose shape and dtype the placeholder has.
        template: the error message; `names` replace ``{}``.
        names: of the parameter and its unit. There are many placeholders, so messages are created when they are raised.
        device, dtype: default to those of `like`.
        requires_grad: likewise.
    """

    # Without a dictionary, which would be allocated for each parameter.
    __slots__ = ("_names", "_template", "listed", "stands_for")

    _template: str
    _names: tuple[str, ...]
    stands_for: Tensor | None  # the tensor kept elsewhere
    listed: Tensor | None  # the parameter listed in this place

    # Without this, every attribute access would go through Python; operations are caught by the dispatcher below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        template: str,
        *names: str,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool | None = None,
    ) -> Placeholder:
        needs = like.requires_grad if requires_grad is None else requires_grad
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device, requires_grad=needs
        )
        self._template, self._names = template, names
        self.stands_for = self.listed = None
        return self

    @property
    def message(self) -> str:
        """The message of the error that any operation raises."""
        return self._template.format(*self._names)

    def rename(self, *names: str) -> None:
        """Use these names in the message from now on."""
        self._names = names

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(_message_in((*args, *(kwargs or {}).values())))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        copied = memo[id(self)] = _rebuild(*self._looks())
        return copied

    def _looks(self) -> tuple[Any, ...]:
        return self.shape, self.dtype, self.device, self.requires_grad, self._template, self._names, type(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_model_under_way():
            raise RuntimeError(f"{self.message} (To pickle a module, pickle the FullyShardedDataParallel around it.)")
        return _rebuild, self._looks()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self.message)

    # These access memory without using the dispatcher.
    data = property(_refuse, _refuse)
    numpy = tolist = item = data_ptr = untyped_storage = __array__ = __dlpack__ = __copy__ = _refuse
    # These would change only the placeholder, and be lost with it.
    register_hook = register_post_accumulate_grad_hook = _refuse

    def requires_grad_(self, requires_grad: bool = True) -> Placeholder:
        """Freeze or thaw the parameter listed in this place; raise RuntimeError if there is none."""
        if self.listed is None:
            raise RuntimeError(
                f"{self.message} requires_grad={requires_grad} here would have no effect: freeze or thaw before "
                "sharding, or set requires_grad of the sharded model's parameters(); with use_orig_params=True these "
                "are single parameters."
            )
        self.listed.requires_grad_(requires_grad)
        return self

    def _requires_grad(self) -> bool:
        own: bool = Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]
        return own if self.listed is None else self.listed.requires_grad

    requires_grad = property(_requires_grad, requires_grad_)  # type: ignore[arg-type]


class AbsentParameter(Placeholder):
    """A placeholder for a parameter. Functions such as `nn.Module.get_parameter` accept it as a parameter.

    The placeholder shows the gradient of the parameter listed in its place, if there is one.
    """

    _is_param = True

    def __getattr__(self, name: str) -> Any:
        why = "" if name.startswith("_") else f" {self.message}"  # private names may be read before there is a message
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'.{why}")

    @property
    def grad(self) -> Tensor | None:
        return None if self.listed is None else self.listed.grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if self.listed is None:
            raise RuntimeError(
                f"{self.message} Setting a gradient here has no effect: set the gradient of the flat parameter in the "
                "sharded model's parameters(), or parts of it inside `with "
                "model.summon_full_params(with_grads=True):`; with use_orig_params=True each parameter has its own "
                "gradient."
            )
        self.listed.grad = grad


class ValuelessParameter(AbsentParameter):
    """A placeholder for a parameter without values on any rank, until values are stored."""


# A placeholder is only pickled as a part of a model: a separate pickle would be expected to contain values, and fail
# when the file is read. Pickle provides no callback for the end of an object, but it saves the object's state in order;
# therefore a model's state ends with an `Arrival`.
_under_way = 0


class Arrival:
    """A marker that pickle processes at the end of a model's state, or deletes if pickling fails before."""

    _is_awaited = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._arrive()
        return Arrival, ()

    def __del__(self) -> None:
        self._arrive()

    def _arrive(self) -> None:
        if self._is_awaited:
            self._is_awaited = False
            _count(-1)


def depart() -> Arrival:
    """Mark that a model is being pickled, until the returned object is pickled or deleted."""
    arrival = Arrival()
    arrival._is_awaited = True
    _count(1)
    return arrival


@contextmanager
def under_way() -> Iterator[None]:
    """Mark that a model is being copied, inside this context."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def is_model_under_way() -> bool:
    """Return whether a model is being pickled or copied."""
    return _under_way > 0


def _count(step: int) -> None:
    global _under_way
    _under_way = max(0, _under_way + step)


def _rebuild(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    template: str,
    names: tuple[str, ...],
    kind: type[Placeholder],
) -> Placeholder:
    like = torch.empty(shape, dtype=dtype, device="meta")
    return kind(like, template, *names, device=device, requires_grad=requires_grad)


def _message_in(values: Any) -> str:
    for value in values:
        if isinstance(value, Placeholder):
            return value.message
        if isinstance(value, (list, tuple)):
            found = _message_in(value)
            if found:
                return found
    return ""


def sharded_weight(name: str, like: Tensor) -> Placeholder:
    """Create the placeholder of a parameter while its unit is sharded."""
    return AbsentParameter(
        like,
        "{} is sharded: outside of the forward and backward of {} this rank holds only a shard of it, under another "
        "name. Call the sharded module (its forward gathers the weights; another module that reads them must be in "
        "the same unit). To call a part of a unit by itself, make the part a unit as well. If a method other than "
        "forward reads them, register it once: fsdp.register_fsdp_forward_method(model, 'name'). Or read and change "
        "unsharded parameters inside `with model.summon_full_params():`.",
        *(name, "its unit"),
    )


def valueless_weight(name: str, like: Tensor) -> Placeholder:
    """Create the placeholder of a parameter without values, for a world size of 1."""
    return ValuelessParameter(
        like,
        "{} has no values yet: it was on the meta device when it was sharded. Initialize it with "
        "fsdp.materialize(model), or load values.",
        name,
    )


def unreduced_gradient(name: str, like: Tensor) -> Placeholder:
    """Create the placeholder of a gradient after a backward under `no_sync`."""
    return Placeholder(
        like.detach(),
        "the gradients of {} were accumulated under no_sync() and not reduced over the ranks yet. Run the last "
        "backward of the step outside no_sync(), or drop them with zero_grad(set_to_none=True). With placements whose "
        "gradients are PARTIAL (SHARD_OPTIM), the step reduces them: call fsdp.reduce_gradients(model) to read them "
        "before it. A loss term that uses the sharded model's parameters() directly must be in the step's first "
        "backward already.",
        name,
        dtype=like.grad_dtype,
    )


def gradient_elsewhere(name: str, like: Tensor, gradient: Tensor) -> Placeholder:
    """Create the placeholder of a gradient stored on a different device than its parameter."""
    return Placeholder(
        like.detach(),
        "the gradient of {} is kept on {} and the parameter on {}, as set by move_params_to_cpu and "
        "move_grads_to_cpu; clip_grad_norm_, ShardedGradScaler and torch's optimizers move them to one device. To "
        "read it before that, set both options to the same value.",
        *(name, str(gradient.device), str(like.device)),
        dtype=gradient.dtype,
    )


def copy_as(leaf: nn.Parameter, placeholder: Placeholder) -> None:
    """Copy and pickle a leaf as its placeholder if it is part of a model, and with its values if it is separate."""
    copies = _LeafCopies(leaf, placeholder)
    leaf.__dict__["__deepcopy__"], leaf.__dict__["__reduce_ex__"] = copies.copied, copies.reduced


class _LeafCopies:
    """Copies and pickles a leaf, see `copy_as`."""

    __slots__ = ("_leaf", "_placeholder")

    def __init__(self, leaf: nn.Parameter, placeholder: Placeholder) -> None:
        self._leaf, self._placeholder = weakref.ref(leaf), placeholder

    def copied(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._placeholder, memo) if is_model_under_way() else self._apart()

    def reduced(self, protocol: Any) -> Any:
        return (self._placeholder if is_model_under_way() else self._apart()).__reduce_ex__(protocol)

    def _apart(self) -> Tensor:
        """Return a copy of the leaf with its values, if any: a module may refer to a former leaf."""
        leaf = self._leaf()
        local = None if leaf is None else local_part(leaf)
        if leaf is None or local is None or type(local) not in (Tensor, nn.Parameter):
            return self._placeholder  # other classes do not show whether memory is freed
        if local.numel() and not local.untyped_storage().nbytes():
            return self._placeholder
        apart = nn.Parameter(leaf.detach().clone(), leaf.requires_grad)
        give_attributes(apart, attributes_of(leaf))
        return apart
