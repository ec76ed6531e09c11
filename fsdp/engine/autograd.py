"""The functions that use autograd's internals, and the required private names.

``torch._C._current_graph_task_id``, ``torch._C._will_engine_execute_node``,
``torch._C._autograd._get_current_graph_task_keep_graph``,
``torch._C._functorch.peek_interpreter_stack``, ``torch._C._autograd._unsafe_set_version_counter``,
``torch._dynamo.compiled_autograd.in_compiled_autograd_region`` and ``Variable._execution_engine.queue_callback`` have
no public counterpart; torch's own DistributedDataParallel, FSDP and ``register_multi_grad_hook`` use them. The dispatch
modes of `torch.utils.checkpoint` and `torch.autograd.graph` are private, too. Tested with torch 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, overrides
from torch.autograd import Variable
from torch.autograd.graph import _CloneArgBeforeMutateMode, increment_version
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fsdp.distributed.communicator import uncompiled
from fsdp.engine.counted_data import version_of


def backward_id() -> int:
    """Return the number of the running backward on this thread; -1 if there is none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread; a forward that starts here recomputes."""
    return backward_id() != -1


def retains_graph() -> bool:
    """Return whether autograd is running a backward with a retained graph on this thread."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def in_transform() -> bool:
    """Return whether a transform of `torch.func` is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_UNCHANGED = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Create ordinary tensors in this context, even during a transform of `torch.func`; see `outside_modes`."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return outside_modes()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # private (torch 2.11 to 2.15)

    return temporarily_clear_interpreter_stack()


def outside_modes() -> AbstractContextManager[Any]:
    """Hide operations in this context from function modes and from selective activation checkpoints.

    Function modes see each attribute access, also of parameters with freed memory: printing such a parameter would end
    the process. A default device is also such a mode, and remains active.

    A selective checkpoint numbers the operations of a forward, stores some results, and returns them by number during
    recomputation. A recomputation runs fewer all-gathers, and would get results of other operations.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return _UNCHANGED


@contextmanager
def _without_modes() -> Iterator[None]:
    dispatch, function = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    others = [mode for mode in dispatch if not isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)]
    devices = [mode for mode in function if isinstance(mode, DeviceContext)]
    with (
        _replaced(function, devices, overrides._pop_mode, overrides._push_mode),
        _replaced(dispatch, others, _python_dispatch._pop_mode, _python_dispatch._push_mode),
    ):
        yield


@contextmanager
def _replaced(
    modes: Sequence[Any], others: Sequence[Any], pop: Callable[[], Any], push: Callable[[Any], None]
) -> Iterator[None]:
    for _ in modes:
        pop()
    for mode in others:
        push(mode)
    try:
        yield
    finally:
        for _ in others:
            pop()
        for mode in modes:
            push(mode)


def unpacks_saved_tensors() -> Any:
    """Return the function to unpack tensors that autograd saves now, for example a checkpoint's; None by default.

    The function is alive as long as a graph contains tensors saved by its hooks.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[1]


def copies_saved_tensors() -> bool:
    """Return whether `allow_mutation_on_saved_tensors` copies saved tensors before they are written.

    The mode identifies tensors by the address of their memory. Copying freed memory may end the process.
    """
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        isinstance(mode, _CloneArgBeforeMutateMode) for mode in _get_current_dispatch_mode_stack()
    )


def will_run(node: Any) -> bool:
    """Return whether the running autograd pass will reach a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # a leaf passed to `torch.autograd.grad`: the gradient is returned and not accumulated


class _Edge(torch.autograd.Function):
    """An operation, only used for its place in the graph."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def accumulator_of(leaf: Tensor) -> Any:
    """Return the node through which autograd accumulates the gradient of a leaf.

    Unlike `torch.autograd.graph.get_gradient_edge`, this runs no operation on the leaf: its memory may be freed while a
    user's mode sees operations, or its class may not support the operation.
    """
    with torch.enable_grad():
        edge: Any = _Edge.apply(leaf)
        return edge.grad_fn.next_functions[0][0]


class BackwardPass:
    """A run of autograd, from its first hook to the end. Must be created in a hook.

    `at_end` is called when the run (the innermost, if backwards are nested) has finished. A run that raised an
    exception is never finished: autograd then deletes the callback, which `is_alive` detects. In this case
    `at_failure` is called, if this object still exists.
    """

    def __init__(self, at_end: Callable[[], None], at_failure: Callable[[], None] | None = None) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            raise RuntimeError(
                "compiled autograd runs a backward of a sharded model, but calls no callbacks at its end: gradients "
                "would not be reduced. Set torch._dynamo.config.compiled_autograd = False, and compile the blocks of "
                "the model."
            )
        ended: list[bool] = []
        end = _End(at_end, ended)

        def drop(_: Any) -> None:
            if at_failure is not None and not ended:
                at_failure()

        self._callback = weakref.ref(end, drop)
        Variable._execution_engine.queue_callback(end)

    @property
    def is_alive(self) -> bool:
        return self._callback() is not None


class _End:
    """The callback of a run of autograd. Not a function, which would be excluded from compilation each time."""

    def __init__(self, at_end: Callable[[], None], ended: list[bool]) -> None:
        self._at_end, self._ended = at_end, ended

    @uncompiled
    def __call__(self) -> None:
        self._ended.append(True)
        with outside_transforms():
            self._at_end()


class FollowedPass:
    """Represents a backward that other ranks run, while this rank only takes part in its collectives."""

    def __init__(self, *, is_alive: bool = True) -> None:
        self.is_alive = is_alive


class FreedLeaves:
    """Leaves whose memory is freed temporarily: autograd must not read saved views of them during this time.

    Autograd would read past the end of the memory. While the leaves are sealed, their versions differ, so that
    autograd raises the error for modified tensors.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = tuple(leaves)
        self._versions: tuple[int, ...] | None = None  # the versions known to autograd, while leaves are sealed

    def seal(self) -> None:
        """Change the versions, because the memory is freed and a graph may have saved the leaves."""
        if self._versions is None:
            self._versions = tuple(map(version_of, self._leaves))
            increment_version(self._leaves)

    def outdate(self) -> None:
        """Keep earlier graphs invalid, because the leaves get new values."""
        if self._versions is None:
            increment_version(self._leaves)
        self._versions = None

    def unseal(self) -> None:
        """Restore the versions, because the leaves have their values again."""
        versions, self._versions = self._versions, None
        if versions is not None:
            torch._C._autograd._unsafe_set_version_counter(self._leaves, versions)


def differentiable_tensors(tree: Any) -> list[Tensor]:
    """Return tensors with `requires_grad` in nested containers and in attributes of any objects."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # keeps references, because ids of deleted objects are used again
    ahead = [tree]
    while ahead:
        item = ahead.pop()
        if isinstance(item, Tensor):
            if item.requires_grad:
                found[id(item)] = item
        elif id(item) not in seen:
            seen[id(item)] = item
            ahead.extend(reversed(list(_parts(item))))
    return list(found.values())


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, (str, bytes, int, float, complex, type(None), type, torch.nn.Module)):
        return ()
    if isinstance(item, (list, tuple, deque, set, frozenset)):
        return item
    if isinstance(item, Mapping):
        return item.values()
    # Distributions, model outputs and users' classes: tensors in their attributes become part of the loss as well.
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


class InternalError(RuntimeError):
    """A broken invariant of the library: a bug in the library, not in the code that uses it.

    The message and the stack are also printed, because autograd may swallow exceptions of hooks.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        print(f"fsdp internal error: {message}", file=sys.stderr)
        traceback.print_stack(file=sys.stderr)
