"""The functions that use autograd's internals, and the private names that they require.

``torch._C._current_graph_task_id``, ``torch._C._will_engine_execute_node``,
``torch._C._autograd._get_current_graph_task_keep_graph``,
``torch._C._functorch.peek_interpreter_stack``, ``torch._C._autograd._unsafe_set_version_counter``,
``torch._dynamo.compiled_autograd.in_compiled_autograd_region`` and ``Variable._execution_engine.queue_callback`` have
no public counterpart; torch's own DistributedDataParallel, FSDP and ``register_multi_grad_hook`` use them. The dispatch
modes of `torch.utils.checkpoint` and `torch.autograd.graph` are private, too. Tried on torch 2.11 to 2.15.
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
    """Return the number of the backward that autograd runs on this thread now; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread now: a forward that starts here recomputes."""
    return backward_id() != -1


def retains_graph() -> bool:
    """Return whether autograd runs a backward on this thread now that can be followed by another of the same graph."""
    return in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def in_transform() -> bool:
    """Return whether this runs inside of a transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_UNCHANGED = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Create ordinary tensors inside the context, even while a transform of `torch.func` runs; see `outside_modes`."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return outside_modes()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # private (torch 2.11 to 2.15)

    return temporarily_clear_interpreter_stack()


def outside_modes() -> AbstractContextManager[Any]:
    """Hide what runs inside the context from function modes, and from selective activation checkpoints.

    Function modes see each attribute that is read, also of parameters whose memory is freed: printing one would end the
    process. A default device is such a mode as well, and stays.

    A selective checkpoint numbers the operations of a forward, keeps the results of some, and returns them in the
    recomputation by these numbers. A recomputation has fewer all-gathers, and would get results of other operations.
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
    """Return the function that will return to autograd what it saves now, as of a checkpoint; None if it keeps that.

    It lives for as long as a graph has tensors that were saved by it.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[1]


def copies_saved_tensors() -> bool:
    """Return whether `allow_mutation_on_saved_tensors` copies tensors that autograd has saved before they are written.

    It knows them by the addresses of their memory. If that was freed, copying it may end the process.
    """
    return bool(torch._C._len_torch_dispatch_stack()) and any(
        isinstance(mode, _CloneArgBeforeMutateMode) for mode in _get_current_dispatch_mode_stack()
    )


def will_run(node: Any) -> bool:
    """Return whether the run of autograd that this is called in will come to a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # a leaf that `torch.autograd.grad` was asked for: its gradient is returned, and nothing is added


class _Edge(torch.autograd.Function):
    """An operation of which only its place in the graph counts."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def accumulator_of(leaf: Tensor) -> Any:
    """Return the node by which autograd adds to the gradient of a leaf.

    Unlike `torch.autograd.graph.get_gradient_edge`, it runs no operation on the leaf, whose memory may be freed while a
    mode of a user sees operations, or whose class may have no such operation.
    """
    with torch.enable_grad():
        edge: Any = _Edge.apply(leaf)
        return edge.grad_fn.next_functions[0][0]


class BackwardPass:
    """A run of autograd, from its first hook to its end. Create it inside a hook.

    `at_end` is called when the run (the innermost, if backwards are nested) has finished. A run that raised an
    exception is never finished: autograd then deletes the callback, which `is_alive` detects. In this case
    `at_failure` is called, if this object still exists.
    """

    def __init__(self, at_end: Callable[[], None], at_failure: Callable[[], None] | None = None) -> None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and compiled.in_compiled_autograd_region:
            raise RuntimeError(
                "compiled autograd runs a backward of a sharded model: it calls nothing when backward has ended, so "
                "gradients would not be reduced. Leave torch._dynamo.config.compiled_autograd at False, and compile "
                "the blocks of the model."
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
    """The callback of a run of autograd. It is not a function, which would be excluded from compilation each time."""

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

    Autograd would read past the end of the memory. While the leaves are `sealed`, their versions differ, so that
    autograd raises its error for modified tensors.
    """

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._leaves = tuple(leaves)
        self._versions: tuple[int, ...] | None = None  # while they are sealed: those that autograd knows

    def seal(self) -> None:
        """The leaves lose their memory, and a graph may have saved them."""
        if self._versions is None:
            self._versions = tuple(map(version_of, self._leaves))
            increment_version(self._leaves)

    def outdate(self) -> None:
        """They get other values, so graphs that have saved them remain invalid."""
        if self._versions is None:
            increment_version(self._leaves)
        self._versions = None

    def unseal(self) -> None:
        """They have their values again, and their versions."""
        versions, self._versions = self._versions, None
        if versions is not None:
            torch._C._autograd._unsafe_set_version_counter(self._leaves, versions)


def differentiable_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a nest that require a gradient, those in attributes of any objects included."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # keeps what it has seen, because the id of something that died is used again
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
    # Distributions, model outputs, users' own classes: what they carry goes into the loss as well.
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


class InternalError(RuntimeError):
    """An invariant of the library is broken: a bug in the library, not in the code that uses it.

    The message and the stack are printed as well as raised, because autograd may swallow exceptions of hooks.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        print(f"fsdp internal error: {message}", file=sys.stderr)
        traceback.print_stack(file=sys.stderr)
