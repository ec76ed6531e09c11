"""`wrap` makes a module a unit, `auto_wrap` the modules that a policy selects, and `fsdp.wrap.shard` also the root.

This module does not depend on the wrapper: `enable_wrap` receives the class as an argument. `auto_wrap` first decides
which modules become units (`make_plan`). Then `auto_wrap` creates the wrappers, inner wrappers first, and replaces each
module by its wrapper wherever the module is used. A wrapper removes its module's parameters, so all information about
the original tree must be collected before. Calling the policy and finding ties do not change the model.

A unit may contain a parameter only if it contains every use of the parameter. Otherwise modules outside would keep a
tensor that is no longer updated. The tree is actually a graph, in which a module may have multiple parents and a
parameter multiple holders. Every path from the root to the parameter must therefore pass through the unit, which is
checked by counting paths (`ModuleGraph.contains_every_use`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp.distributed.devices import accelerator
from fsdp.engine.forward_hooks import has_forward
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import join
from fsdp.layers.lazy import lazily
from fsdp.layers.managed_params import refuse_aliases

__all__ = [
    "AutoWrapPolicy",
    "ConfigAutoWrap",
    "auto_wrap",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "lambda_wrap_policy",
    "module_wrap_policy",
    "wrap",
]
__getattr__, __dir__ = lazily(__name__, {})  # names of torch's FSDP1 raise errors with the replacement
_log = logging.getLogger("fsdp.wrap")

# Called with the keywords module, recurse, unwrapped_params, module_is_root. A non-empty dict means True, and contains
# keyword arguments for this module's wrapper.
AutoWrapPolicy = Callable[..., bool | Mapping[str, Any]]


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: float = 1e8,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wrap a module if at least `min_num_params` of its parameters belong to no unit yet.

    A policy by size requires no knowledge of the model, but the resulting units need not be layers;
    `module_wrap_policy` makes each layer a unit. Set arguments with `functools.partial`.

    Args:
        module: the module to wrap or not.
        recurse: If True, the policy returns whether to visit the children of `module`; if the result is False, neither
            `module` nor any module in it is wrapped. If False, the policy returns whether to wrap `module`.
        unwrapped_params: number of parameters (elements) in `module` that belong to no inner unit.
        module_is_root: whether `module` is the argument of `auto_wrap`.
        min_num_params: minimum size of a unit. Small units need less memory at a time, but more and smaller
            collectives.
        force_leaf_modules: classes whose children are not visited, because they read their children's weights without
            calling them; their parameters belong to the enclosing unit. Default:
            `default_auto_wrap_policy.FORCE_LEAF_MODULES` ({nn.MultiheadAttention}).
        exclude_wrap_modules: classes whose children are visited but which are never wrapped, because they are never
            called. Default: `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES` ({nn.ModuleList, nn.ModuleDict}). Modules
            without a forward (for example `nn.ParameterList`) are never wrapped either.
        skip_params_check_for_root: If True, wrap the root regardless of its number of remaining parameters (unless its
            class is listed above).
    """
    large_enough = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
    if recurse:
        never = force_leaf_classes() if force_leaf_modules is None else tuple(force_leaf_modules)
    else:
        never = _exclude_wrap_classes() if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
        large_enough = large_enough and has_forward(module)
    return large_enough and not isinstance(module, never)


# Attributes of the function, and read at each call, because callers extend them in place.
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def force_leaf_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes whose children are not visited."""
    return tuple(default_auto_wrap_policy.FORCE_LEAF_MODULES)  # type: ignore[attr-defined]


def _exclude_wrap_classes() -> tuple[type[nn.Module], ...]:
    return tuple(default_auto_wrap_policy.EXCLUDE_WRAP_MODULES)  # type: ignore[attr-defined]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wrap all modules with a `wrapper_config` attribute.

    The attribute is a dict of keyword arguments for the module's wrapper (see `wrap`); an empty dict uses the
    context's settings. Sizes and `module_is_root` have no effect.
    """
    return recurse or hasattr(module, "wrapper_config")


def module_wrap_policy(classes: Iterable[type[nn.Module]], exclude: Iterable[type[nn.Module]] = ()) -> AutoWrapPolicy:
    """Return a policy that wraps the instances of the given classes, such as a model's transformer block.

    The returned policy never wraps a container (a module without its own `forward`, such as nn.ModuleList), because a
    unit requires that its module is called. Children of `default_auto_wrap_policy.FORCE_LEAF_MODULES` are not wrapped;
    such a module itself is wrapped if `classes` contains its class.

    Args:
        classes: the classes to wrap, subclasses included.
        exclude: classes that are not wrapped although `classes` contains a base class. Their children are still
            visited.

    Raises:
        ValueError: if `classes` is empty, or if an element is not an nn.Module class, is in
            `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES`, or is also in `exclude`.
    """
    wanted, unwanted = _module_classes("classes", classes), _module_classes("exclude", exclude)
    if not wanted:
        raise ValueError(
            "module_wrap_policy got no classes, so it would wrap nothing. Pass at least one class, for example "
            "module_wrap_policy({Block})."
        )
    for cls in wanted:
        if cls in _exclude_wrap_classes():
            raise ValueError(
                f"module_wrap_policy can not wrap {cls.__name__}: it has no forward, so its unit would never run. Pass "
                "the class of the modules in it."
            )
        if cls in unwanted:
            raise ValueError(
                f"module_wrap_policy got {cls.__name__} in both classes and exclude. Remove it from one of them."
            )
    return lambda_wrap_policy(lambda module: isinstance(module, wanted) and not isinstance(module, unwanted))


def _module_classes(argument: str, classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    if isinstance(classes, (str, type)) or not isinstance(classes, Iterable):
        raise ValueError(f"module_wrap_policy takes a set of classes as {argument}, got {classes!r}.")
    found = tuple(classes)
    for cls in found:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(
                f"module_wrap_policy takes nn.Module classes, got {cls!r} in {argument}. Pass the class itself, not "
                "its name or an instance."
            )
    return found


def lambda_wrap_policy(predicate: Callable[[nn.Module], bool | Mapping[str, Any]]) -> AutoWrapPolicy:
    """Return a policy that wraps the modules for which `predicate(module)` is true.

    As with `module_wrap_policy`, containers are never wrapped, but their children are visited (the predicate is not
    called for containers). A module of `default_auto_wrap_policy.FORCE_LEAF_MODULES` is wrapped as a whole or not at
    all.

    Args:
        predicate: a function of a module, called before any module in it is wrapped, possibly multiple times. Like any
            policy, the function may return keyword arguments for the module's wrapper (see `auto_wrap`).

    Raises:
        ValueError: if `predicate` is not callable.
    """
    if not callable(predicate):
        raise ValueError(f"lambda_wrap_policy takes a function of a module, got {predicate!r}.")
    return _PredicatePolicy(predicate)


class _PredicatePolicy:
    def __init__(self, predicate: Callable[[nn.Module], bool | Mapping[str, Any]]) -> None:
        self._predicate = predicate
        # Returning False for recurse=True would also exclude the forced leaf itself. A leaf that is to be wrapped
        # is therefore visited, and the modules inside the leaf are recorded here, to be rejected.
        self._inside_leaf: WeakSet[nn.Module] = WeakSet()

    def __call__(self, module: nn.Module, recurse: bool, unwrapped_params: int, **_: Any) -> bool | Mapping[str, Any]:
        if not recurse:
            return module not in self._inside_leaf and self._wants(module)
        if not isinstance(module, force_leaf_classes()):
            return module not in self._inside_leaf
        self._inside_leaf.update(inner for inner in module.modules() if inner is not module)
        return module not in self._inside_leaf and self._wants(module)

    def _wants(self, module: nn.Module) -> bool | Mapping[str, Any]:
        return has_forward(module) and self._predicate(module)


class ConfigAutoWrap:
    """The settings of `wrap` and `auto_wrap`, stored on the class; use `enable_wrap` to set them.

    An instance is a reusable context manager. Only a single context may be active in a process, because the state
    belongs to the class and is shared by all threads.

    Attributes, to be read on the class:
        in_autowrap_context: whether a context is active.
        wrapper_cls: the class or function that makes a module a unit; None outside.
        kwargs: keyword arguments of every wrapper; empty outside.
        auto_wrap_policy: the policy of `auto_wrap` calls without a policy; None outside.
        move_module_cuda_half: whether modules are moved to the current accelerator as float16 first.
    """

    in_autowrap_context: bool = False
    wrapper_cls: Callable[..., nn.Module] | None = None
    kwargs: dict[str, Any] = {}  # noqa: RUF012 (callers read it on the class; it is replaced, never changed)
    auto_wrap_policy: AutoWrapPolicy | None = None
    move_module_cuda_half: bool = False

    def __init__(self, auto_wrap_policy: AutoWrapPolicy | None = None, **kwargs: Any) -> None:
        self.auto_wrap_policy = auto_wrap_policy
        self.kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(auto_wrap_policy: AutoWrapPolicy | None, kwargs: Mapping[str, Any]) -> None:
        """Set the class-level state from `enable_wrap`'s arguments; raises as `enable_wrap` does."""
        if ConfigAutoWrap.in_autowrap_context:
            raise NotImplementedError(
                "enable_wrap is already active here, and contexts do not nest. Leave the outer context first, or pass "
                "the differing settings to wrap(module, ...) or auto_wrap(module, policy, ...)."
            )
        settings = dict(kwargs)
        wrapper_cls = settings.pop("wrapper_cls", None)
        if not callable(wrapper_cls):
            raise ValueError(
                f"enable_wrap needs the class to wrap with, got wrapper_cls={wrapper_cls!r}. Pass for example "
                "enable_wrap(wrapper_cls=FullyShardedDataParallel)."
            )
        ConfigAutoWrap.in_autowrap_context = True
        ConfigAutoWrap.wrapper_cls = wrapper_cls
        ConfigAutoWrap.move_module_cuda_half = bool(settings.pop("move_module_cuda_half", False))
        ConfigAutoWrap.kwargs = settings
        ConfigAutoWrap.auto_wrap_policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy

    @staticmethod
    def disable_autowrap_context() -> None:
        """Reset the class-level state to its values outside any context."""
        ConfigAutoWrap.in_autowrap_context = False
        ConfigAutoWrap.wrapper_cls = None
        ConfigAutoWrap.move_module_cuda_half = False
        ConfigAutoWrap.kwargs = {}
        ConfigAutoWrap.auto_wrap_policy = None

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.auto_wrap_policy, self.kwargs)

    def __exit__(self, *raised: Any) -> None:
        self.disable_autowrap_context()

    @staticmethod
    def recursive_wrap(
        module: nn.Module,
        auto_wrap_policy: AutoWrapPolicy | None,
        module_is_root: bool = True,
        *,
        keep_wrapped: bool = False,
        **kwargs: Any,
    ) -> tuple[nn.Module, int]:
        """Like `auto_wrap`, but also return the number of parameters that now belong to units.

        Raises RuntimeError outside a context, and otherwise the same errors as `auto_wrap`.
        """
        policy = ConfigAutoWrap.auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        if not ConfigAutoWrap.in_autowrap_context or policy is None:
            raise RuntimeError("recursive_wrap needs an active context: call it inside enable_wrap(...).")
        wrapped = wrapped_in(module, ConfigAutoWrap.wrapper_cls, is_allowed=keep_wrapped)
        graph = ModuleGraph(module, wrapped, {**ConfigAutoWrap.kwargs, **kwargs})
        return wrap_units(graph, policy, lambda unit, own: wrap(unit, **{**kwargs, **own}), module_is_root)


@contextmanager
def enable_wrap(auto_wrap_policy: AutoWrapPolicy | None = None, **kwargs: Any) -> Iterator[None]:
    """Enable `wrap` and `auto_wrap` inside the context; outside they return their module unchanged.

    A model whose constructor calls `wrap(layer)` can therefore be built plain or sharded, and layer by layer, so that
    at most a single layer is unsharded. The settings apply to the whole process, including other threads, and are
    restored on exit, also after an exception. Not collective; however, `wrapper_cls` may be collective, so enter the
    context on every rank with the same arguments.

    Args:
        auto_wrap_policy: the policy of `auto_wrap` calls without a policy; default: `default_auto_wrap_policy`. `wrap`
            does not use it.
        **kwargs: `wrapper_cls` (required) is a class or another callable that receives a module and returns the wrapped
            module. `move_module_cuda_half=True` moves each module to the current accelerator and casts it to float16
            before wrapping. All other keyword arguments are passed to `wrapper_cls`.

    Raises:
        ValueError: if `wrapper_cls` is missing or not callable.
        NotImplementedError: if a context is already active.
    """
    with ConfigAutoWrap(auto_wrap_policy, **kwargs):
        yield


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Wrap a module inside `enable_wrap`; outside, return it unchanged.

    The wrapper's keyword arguments are the context's, then those in `module.wrapper_config` if the module has this
    attribute, then `overrides`; later values take precedence. Not collective, unless `wrapper_cls` is.

    Parameters that the module shares with other modules are not detected: to keep them tied, wrap a module that
    contains all their uses, or use `auto_wrap`.

    Args:
        module: the module that becomes a unit, regardless of its size.
        **overrides: keywords for this wrapper only.

    Raises:
        ValueError: if `module.wrapper_config` is not a dict.
        RuntimeError: if the context has `move_module_cuda_half=True` and there is no accelerator.
    """
    wrapper_cls = ConfigAutoWrap.wrapper_cls
    if not ConfigAutoWrap.in_autowrap_context or wrapper_cls is None:
        _warn_unwrapped("wrap() outside of enable_wrap", module, _ENTER)
        return module
    own_config = wrapper_config_of(module)
    if ConfigAutoWrap.move_module_cuda_half:
        device = accelerator()
        if device is None:
            raise RuntimeError(
                f"move_module_cuda_half=True moves {type(module).__name__} to an accelerator, but torch sees none "
                "here. Omit the option on this machine."
            )
        module = module.to(device).half()
    return wrapper_cls(module, **{**ConfigAutoWrap.kwargs, **own_config, **overrides})


def wrapper_config_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the keyword arguments for a module's wrapper from the module's attribute `wrapper_config`."""
    own_config = getattr(module, "wrapper_config", {})
    if not isinstance(own_config, Mapping):
        raise ValueError(
            f"{type(module).__name__}.wrapper_config is {own_config!r}; it must be a dict of keyword arguments for the "
            "wrapper (an empty dict to use the context's)."
        )
    return own_config


def auto_wrap(
    module: nn.Module, auto_wrap_policy: AutoWrapPolicy | None = None, *, keep_wrapped: bool = False, **kwargs: Any
) -> nn.Module:
    """Wrap the modules that a policy selects in a module tree; outside `enable_wrap`, return the module unchanged.

    Children are replaced in place, and the module is returned; the module itself is wrapped only if the policy selects
    it. A module that is used multiple times is wrapped once, and every use is replaced by the same wrapper. Modules
    without parameters are not wrapped. Not collective; however, `wrapper_cls` may be collective, so call this function
    on every rank with the same model and policy.

    Tied parameters stay tied. A module is not wrapped if a parameter that belongs to no inner unit is also used
    outside (a Parameter of multiple modules, or of a module with multiple parents). The parameter belongs to the
    lowest unit that contains all its uses, or stays unwrapped if there is none; the logger `fsdp.wrap` reports this at
    level INFO. Only ties inside `module` are detected: if `module` shares a parameter with other parts of a larger
    model, call `auto_wrap` on that model.

    The policy is called for all modules before any change, so an exception in the policy leaves the module unchanged.
    If `wrapper_cls` raises an exception, the units that were already created are kept.

    Args:
        module: the root of the module tree. The root must not be an instance of `wrapper_cls`, and neither must any
            module in it unless `keep_wrapped`.
        auto_wrap_policy: `policy(module=, recurse=, unwrapped_params=, module_is_root=) -> bool`; default: the
            context's. The policy is first called with `recurse=True` from the top down. If the result is False,
            neither the module nor any module in it is wrapped, also if they are used elsewhere. Then the policy is
            called with `recurse=False` from the bottom up and returns whether to wrap the module. `unwrapped_params`
            counts the elements of the parameters that belong to no inner unit, each parameter once. Instead of True
            the policy may return a dict of keyword arguments for this wrapper, which take precedence over all other
            settings: ``{"reshard_after_forward": False}``.
        keep_wrapped: If True, keep existing wrappers and wrap the remaining modules: an enclosing unit contains the
            remaining parameters. If False, existing wrappers raise an error, as in FairScale.
        **kwargs: keyword arguments for all wrappers that this call creates, which take precedence over the context's
            and a `wrapper_config`. Modules and parameters in `ignored_modules` and `ignored_parameters`, here or in
            the context, are not counted and belong to no unit.

    Raises:
        ValueError: if a module inside is already an instance of `wrapper_cls`, is a lazy module that has not been run,
            or contains itself; also as in `wrap`.
        RuntimeError: as in `wrap`.
    """
    if not ConfigAutoWrap.in_autowrap_context:
        _warn_unwrapped("auto_wrap() outside of enable_wrap", module, _ENTER)
        return module
    wrapped, numel = ConfigAutoWrap.recursive_wrap(
        module, auto_wrap_policy, module_is_root=True, keep_wrapped=keep_wrapped, **kwargs
    )
    if not numel and not keep_wrapped and any(True for _ in module.parameters()):
        _warn_unwrapped("auto_wrap() with a policy that selects no module", module, _PICK)
    return wrapped


_ENTER = "Call it inside `with enable_wrap(wrapper_cls=FullyShardedDataParallel):`."
_PICK = "Pass a policy that selects modules in it: fsdp.module_wrap_policy({Block}), or a smaller min_num_params."


def _warn_unwrapped(what: str, module: nn.Module, remedy: str) -> None:
    """Warn if there are multiple ranks and no module was wrapped, so that each rank would train its own model."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{what} does not wrap this {type(module).__name__}: unless it is wrapped otherwise, each of the "
            f"{dist.get_world_size()} ranks trains a separate model. {remedy}",
            stacklevel=3,
        )


def wrapped_in(root: nn.Module, wrapper_cls: Callable[..., nn.Module] | None, is_allowed: bool) -> list[nn.Module]:
    """Return the wrappers in a module; raise ValueError for the root, and for any wrapper if none is allowed."""
    kind: Any = wrapper_cls
    while isinstance(kind, functools.partial):
        kind = kind.func
    if not isinstance(kind, type):
        return []  # a plain function, of which the returned class is unknown
    wrapped: type[nn.Module] = kind
    found = [(name, module) for name, module in root.named_modules() if isinstance(module, wrapped)]
    for name, module in found:
        if module is root or not is_allowed:
            where = f"{name!r} in {type(root).__name__}" if name else "the module itself"
            raise ValueError(
                f"auto_wrap found that {where} is wrapped by {kind.__name__} already. Call auto_wrap "
                "before wrapping anything inside, or wrap what is left with auto_wrap(..., keep_wrapped=True)."
            )
    return [module for _, module in found]


# Module._modules and _parameters are private by name only (tested with torch 2.11 to 2.15). The public
# iterators skip repeated uses of a module or parameter, which this function requires.
def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


class ModuleGraph:
    """The modules and parameters below a module; each may be used multiple times.

    Excludes the modules in `wrapped`, and the modules and parameters that the `options` of the wrappers ignore.
    """

    def __init__(self, root: nn.Module, wrapped: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
        self.root = root
        ignored = Ignored.of(options.get("ignored_modules"), options.get("ignored_parameters"))
        self._ignored = ignored | Ignored.of(wrapped, None)
        self.modules: list[nn.Module] = []  # children before parents, each once
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {root: []}  # (parent, name in it)
        self.holders: Counter[nn.Parameter] = Counter()  # number of modules that directly contain a parameter
        self.uses: dict[nn.Module, Counter[nn.Parameter]] = {}  # number of paths from a module to each parameter in it
        self._visit(root, "")
        self._paths = Counter({root: 1})  # number of paths from the root to each module
        for module in reversed(self.modules):  # parents before children
            self._paths[module] += sum(self._paths[parent] for parent, _ in self.places[module])

    def _visit(self, module: nn.Module, path: str) -> None:
        inside: Counter[nn.Parameter] = Counter()
        for name, parameter in _own_parameters(module):
            if self._ignored.has(module, parameter):
                continue
            if is_lazy(parameter):
                raise ValueError(
                    f"Can not count the elements of {join(path, name)!r}: {type(module).__name__} has not seen "
                    "its input yet. Run the model once before wrapping it."
                )
            inside[parameter] = 1
        self.holders.update(inside)
        for name, child in self.children(module):
            if child not in self.places:
                self.places[child] = []
                self._visit(child, join(path, name))
            elif child not in self.uses:  # still being visited, further up
                raise ValueError(f"{join(path, name)!r} contains itself. Remove it there.")
            self.places[child].append((module, name))
            inside.update(self.uses[child])
        self.uses[module] = inside
        self.modules.append(module)

    def children(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the direct children of a module by name, without ignored modules."""
        children = module._modules.items()
        return [(name, child) for name, child in children if child is not None and child not in self._ignored.modules]

    def contains_every_use(self, module: nn.Module, parameter: nn.Parameter) -> bool:
        """Return True if every path from the root to the parameter goes through the module."""
        return self._paths[module] * self.uses[module][parameter] == self.uses[self.root][parameter]


@dataclass(frozen=True)
class WrapPlan:
    units: dict[nn.Module, Mapping[str, Any]]  # inner units before outer units, with the policy's keyword arguments
    owner: dict[nn.Parameter, nn.Module]  # the unit of each parameter, without parameters that stay unwrapped
    turned_down: dict[nn.Parameter, list[nn.Module]]  # the modules that are not wrapped because of each tie


def make_plan(graph: ModuleGraph, policy: AutoWrapPolicy, module_is_root: bool) -> WrapPlan:
    """Call the policy for the modules that it does not exclude, from the bottom up; see `auto_wrap`."""
    plan = WrapPlan({}, {}, {})
    policy = _with_own_keywords(policy)
    entered: set[nn.Module] = set()
    shut: set[nn.Module] = set()

    def picks(module: nn.Module, recurse: bool, params: Iterable[nn.Parameter]) -> bool | Mapping[str, Any]:
        numel, is_root = sum(p.numel() for p in params), module_is_root and module is graph.root
        return policy(module=module, recurse=recurse, unwrapped_params=numel, module_is_root=is_root)

    def enter(module: nn.Module) -> None:
        if module in entered or module in shut:
            return
        if not picks(module, True, graph.uses[module]):
            shut.update(module.modules())
            return
        entered.add(module)
        for _, child in graph.children(module):
            enter(child)

    enter(graph.root)
    for module in graph.modules:
        # A module that was visited at one place may also be inside a module that is not visited, and is then not
        # wrapped.
        if module not in entered or module in shut:
            continue
        left = [p for p in graph.uses[module] if p not in plan.owner]
        answer = picks(module, False, left)
        if not answer or not graph.uses[module]:
            continue
        used_outside = [p for p in left if not graph.contains_every_use(module, p)]
        for parameter in used_outside:
            plan.turned_down.setdefault(parameter, []).append(module)
        if not used_outside:
            plan.units[module] = answer if isinstance(answer, Mapping) else {}
            plan.owner.update(dict.fromkeys(left, module))
    return plan


def _with_own_keywords(policy: AutoWrapPolicy) -> AutoWrapPolicy:
    """Return a policy with an argument `unwrapped_params`, which policies of torch's FSDP1 call `nonwrapped_numel`."""
    with suppress(TypeError, ValueError):  # of callables without a signature
        if "nonwrapped_numel" in inspect.signature(policy).parameters:
            return lambda module, recurse, unwrapped_params, **_: policy(
                module=module, recurse=recurse, nonwrapped_numel=unwrapped_params
            )
    return policy


def wrap_units(
    graph: ModuleGraph,
    policy: AutoWrapPolicy,
    make_unit: Callable[[nn.Module, Mapping[str, Any]], nn.Module],
    module_is_root: bool = True,
) -> tuple[nn.Module, int]:
    """Wrap the modules that a policy selects, inner modules first.

    `make_unit` is called with each module and the keyword arguments that the policy returned for it. Returns the root,
    wrapped or not, and the number of elements that now belong to units.
    """
    plan = make_plan(graph, policy, module_is_root)
    # Each unit checks its own parameters for shared memory. Across units, frozen parameters remain equal untied.
    named = ((param, name) for name, param in graph.root.named_parameters() if param in graph.holders)
    refuse_aliases({param: name for param, name in named if param.requires_grad})
    _log_ties(graph, plan)
    root = graph.root
    for unit, its_own in plan.units.items():
        wrapper = make_unit(unit, its_own)
        for parent, name in graph.places[unit]:
            setattr(parent, name, wrapper)
        if unit is graph.root:
            root = wrapper
    return root, sum(p.numel() for p in plan.owner)


def _log_ties(graph: ModuleGraph, plan: WrapPlan) -> None:
    """Log each parameter that multiple modules hold, or that prevents a module from being wrapped, at level INFO."""
    tied = [p for p, holders in graph.holders.items() if holders > 1 or p in plan.turned_down]
    if not tied or not _log.isEnabledFor(logging.INFO):
        return
    modules = {module: f"{name!r} ({type(module).__name__})" for name, module in graph.root.named_modules()}
    modules[graph.root] = f"'' (the root, {type(graph.root).__name__})"
    parameters: dict[nn.Parameter, list[str]] = {}  # by all their names
    for path, module in graph.root.named_modules(remove_duplicate=False):
        for name, parameter in _own_parameters(module):
            parameters.setdefault(parameter, []).append(join(path, name))
    for parameter in tied:
        owner = plan.owner.get(parameter)
        where = f"unit {modules[owner]}" if owner else f"{modules[graph.root]}, outside of all units in it"
        turned_down = [modules[module] for module in plan.turned_down.get(parameter, [])]
        suffix = f"; not wrapped because of it: {', '.join(turned_down)}" if turned_down else ""
        _log.info("tied parameter %s stays in %s%s", " = ".join(parameters[parameter]), where, suffix)
