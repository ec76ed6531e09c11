"""A parameter in the place of which a load writes, without memory of its own.

A rank keeps a part of what is loaded. So the tensor that is to be copied is remembered instead, and cut when all of it
is known: of a file that is mapped into memory, nothing else is ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp.state_dict.tensor_part import TensorPart

if TYPE_CHECKING:
    from typing_extensions import Self


class Awaiting(nn.Parameter):
    """Remembers in `source` what `copy_` was called with last; everything else is as on the meta device.

    It says that it is not there, because torch's load warns about meta tensors, into which copying does nothing.
    """

    source: Tensor | None
    may_get_shapes: bool  # what is copied may be on the meta device as well

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, requires_grad: bool, *, may_get_shapes: bool) -> Self:
        """An empty one."""
        self = Tensor._make_subclass(cls, torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
        self.source, self.may_get_shapes = None, may_get_shapes
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], Awaiting):
            if args[1].is_meta and not args[0].may_get_shapes:
                raise NotImplementedError("it is on the meta device, and has no values to copy")
            if isinstance(args[1], TensorPart):
                raise NotImplementedError(
                    f"it is a part of a tensor, {args[1]}. Load a sharded state with load_sharded_state_dict()"
                )
            args[0].source = args[1].detach()
            return args[0]
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
