"""`wrap` makes one module a unit, and `auto_wrap` those that a policy picks; `fsdp.wrap.shard` has both in one call.

Nothing here knows what a wrapper does: its class comes by argument, from `enable_wrap`. `auto_wrap` first
settles what becomes a unit (`make_plan`), then makes the wrappers, inner ones first, and puts each in every
place where its module occurs. A wrapper takes its module's parameters away, so whatever depends on the original tree
has to be known before: a policy is asked and ties are found, and nothing is changed.

A unit may take a parameter only if it contains every use of it: otherwise the modules outside would keep a tensor that
nobody updates any more. The tree is really a graph, in which a module may have several parents and a parameter several
holders, so every path from the root to the parameter has to go through the unit. This is seen from the numbers of paths
(`ModuleGraph.contains_every_use`).
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fsdp.distributed.devices import accelerator
from fsdp.engine.managed_params import Ignored
from fsdp.engine.names import join

_log = logging.getLogger("fsdp.wrap")

# Called with the keywords module, recurse, unwrapped_params, module_is_root. A dict that is not empty says yes, and has
# keywords for this module's wrapper.
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
    """Wrap a module when at least `min_num_params` parameters in it are still without a unit.

    A policy by size needs no knowledge of the model, but it draws the borders of units where the sizes happen
    to fall; `module_wrap_policy` draws them at your layers. Fix arguments with `functools.partial`.

    Args:
        module: the module in question.
        recurse: True asks whether to look inside of `module` at all; no means that neither it nor anything
            in it is wrapped. False asks whether to wrap it.
        unwrapped_params: number of parameters (elements) in `module` that no inner unit has taken.
        module_is_root: whether `module` is the one given to `auto_wrap`.
        min_num_params: smallest unit worth having. Small units hold less memory at a time and need more,
            smaller collectives.
        force_leaf_modules: classes that nobody looks into, because they read their children's weights without
            calling them; they end up in the unit around them. Default:
            `default_auto_wrap_policy.FORCE_LEAF_MODULES` ({nn.MultiheadAttention}).
        exclude_wrap_modules: classes that are looked into but never wrapped, because they are never called.
            Default: `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES` ({nn.ModuleList, nn.ModuleDict}). What has no
            forward (`nn.ParameterList`, say) is never wrapped either.
        skip_params_check_for_root: wrap the root however few parameters it has left (unless its class is one
            of the above).
    """
    large_enough = unwrapped_params >= min_num_params or (module_is_root and skip_params_check_for_root)
    if recurse:
        never = force_leaf_classes() if force_leaf_modules is None else tuple(force_leaf_modules)
    else:
        never = _exclude_wrap_classes() if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
        large_enough = large_enough and is_callable_module(module)
    return large_enough and not isinstance(module, never)


# Attributes of the function, and read at each call, because callers extend them in place.
default_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def force_leaf_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes that nobody looks into."""
    return tuple(default_auto_wrap_policy.FORCE_LEAF_MODULES)  # type: ignore[attr-defined]


def _exclude_wrap_classes() -> tuple[type[nn.Module], ...]:
    return tuple(default_auto_wrap_policy.EXCLUDE_WRAP_MODULES)  # type: ignore[attr-defined]


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Wrap the modules that have a `wrapper_config` attribute, wherever they are.

    The attribute is a dict of keywords for that module's wrapper (see `wrap`); an empty one asks for the
    context's settings. Sizes and `module_is_root` do not matter.
    """
    return recurse or hasattr(module, "wrapper_config")


def module_wrap_policy(classes: Iterable[type[nn.Module]], exclude: Iterable[type[nn.Module]] = ()) -> AutoWrapPolicy:
    """Return a policy that wraps the instances of the given classes, such as a model's transformer block.

    The returned policy goes wherever a policy goes. It never wraps a container (a module without a `forward`
    of its own, such as nn.ModuleList), since a unit works only when its module is called, and it wraps
    nothing inside of `default_auto_wrap_policy.FORCE_LEAF_MODULES`; such a module itself is wrapped if its
    class is asked for.

    Args:
        classes: the classes to wrap, subclasses included.
        exclude: classes that are not wrapped although a base class of theirs is in `classes`. They are still
            looked into.

    Raises:
        ValueError: `classes` is empty; something in it is not an nn.Module class, is one of
            `default_auto_wrap_policy.EXCLUDE_WRAP_MODULES`, or is in `exclude` too.
    """
    wanted, unwanted = _module_classes("classes", classes), _module_classes("exclude", exclude)
    if not wanted:
        raise ValueError(
            "module_wrap_policy got no classes, so it would wrap nothing. Name at least one, "
            "e.g. module_wrap_policy({Block})."
        )
    for cls in wanted:
        if cls in _exclude_wrap_classes():
            raise ValueError(
                f"module_wrap_policy can not wrap {cls.__name__}: it has no forward, so its unit would never "
                "run. Name the class of the modules in it."
            )
        if cls in unwanted:
            raise ValueError(f"module_wrap_policy got {cls.__name__} in both classes and exclude. Take it out of one.")
    return lambda_wrap_policy(lambda module: isinstance(module, wanted) and not isinstance(module, unwanted))


def _module_classes(argument: str, classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    if isinstance(classes, (str, type)) or not isinstance(classes, Iterable):
        raise ValueError(f"module_wrap_policy takes a set of classes as {argument}, got {classes!r}.")
    found = tuple(classes)
    for cls in found:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(
                f"module_wrap_policy takes nn.Module classes, got {cls!r} in {argument}. "
                "Give the class itself, not its name or an instance."
            )
    return found


def lambda_wrap_policy(predicate: Callable[[nn.Module], bool | Mapping[str, Any]]) -> AutoWrapPolicy:
    """Return a policy that wraps the modules for which `predicate(module)` is true.

    The returned policy goes wherever a policy goes. As with `module_wrap_policy`, containers are looked into
    and never wrapped (the predicate is not asked), and a module of
    `default_auto_wrap_policy.FORCE_LEAF_MODULES` is wrapped as a whole or not at all.

    Args:
        predicate: called with a module of the tree before anything in it is wrapped, perhaps more than once. It may
            answer with keywords for the module's wrapper, as any policy (see `auto_wrap`).

    Raises:
        ValueError: `predicate` can not be called.
    """
    if not callable(predicate):
        raise ValueError(f"lambda_wrap_policy takes a function of a module, got {predicate!r}.")
    return _PredicatePolicy(predicate)


class _PredicatePolicy:
    def __init__(self, predicate: Callable[[nn.Module], bool | Mapping[str, Any]]) -> None:
        self._predicate = predicate
        # Answering recurse=True with no would also rule out the forced leaf itself. It is therefore entered
        # when it is to be wrapped, and what is inside of it is remembered here to be turned down.
        self._inside_leaf: WeakSet[nn.Module] = WeakSet()

    def __call__(self, module: nn.Module, recurse: bool, unwrapped_params: int, **_: Any) -> bool | Mapping[str, Any]:
        if not recurse:
            return module not in self._inside_leaf and self._wants(module)
        if not isinstance(module, force_leaf_classes()):
            return module not in self._inside_leaf
        self._inside_leaf.update(inner for inner in module.modules() if inner is not module)
        return module not in self._inside_leaf and self._wants(module)

    def _wants(self, module: nn.Module) -> bool | Mapping[str, Any]:
        return is_callable_module(module) and self._predicate(module)


def is_callable_module(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own, without which a unit never runs."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class ConfigAutoWrap:
    """The settings that `wrap` and `auto_wrap` use, held on the class; `enable_wrap` is the way to set them.

    An instance is a context manager, usable again after it has been left. Only one may be active in a
    process: the state belongs to the class, hence to all threads.

    Attributes, to be read on the class:
        in_autowrap_context: whether a context is active.
        wrapper_cls: what makes a unit of a module; None outside.
        kwargs: keywords that every wrapper gets; empty outside.
        auto_wrap_policy: the policy of `auto_wrap` calls that bring none; None outside.
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
                "enable_wrap is already active here, and contexts do not nest. Leave the outer one first, or "
                "give the differing settings to wrap(module, ...) or auto_wrap(module, policy, ...)."
            )
        settings = dict(kwargs)
        wrapper_cls = settings.pop("wrapper_cls", None)
        if not callable(wrapper_cls):
            raise ValueError(
                f"enable_wrap needs the class to wrap with, got wrapper_cls={wrapper_cls!r}. "
                "Give e.g. enable_wrap(wrapper_cls=FullyShardedDataParallel)."
            )
        ConfigAutoWrap.in_autowrap_context = True
        ConfigAutoWrap.wrapper_cls = wrapper_cls
        ConfigAutoWrap.move_module_cuda_half = bool(settings.pop("move_module_cuda_half", False))
        ConfigAutoWrap.kwargs = settings
        ConfigAutoWrap.auto_wrap_policy = default_auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy

    @staticmethod
    def disable_autowrap_context() -> None:
        """Put the class-level state back to what it is outside of any context."""
        ConfigAutoWrap.in_autowrap_context = False
        ConfigAutoWrap.wrapper_cls = None
        ConfigAutoWrap.move_module_cuda_half = False
        ConfigAutoWrap.kwargs = {}
        ConfigAutoWrap.auto_wrap_policy = None

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.auto_wrap_policy, self.kwargs)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
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
        """Do what `auto_wrap` does, and return also the number of parameters that are in a unit now.

        Raises RuntimeError outside of a context, otherwise as `auto_wrap` does.
        """
        policy = ConfigAutoWrap.auto_wrap_policy if auto_wrap_policy is None else auto_wrap_policy
        if not ConfigAutoWrap.in_autowrap_context or policy is None:
            raise RuntimeError("recursive_wrap needs an active context: call it inside of enable_wrap(...).")
        wrapped = wrapped_in(module, ConfigAutoWrap.wrapper_cls, is_allowed=keep_wrapped)
        graph = ModuleGraph.without(module, wrapped, {**ConfigAutoWrap.kwargs, **kwargs})
        return wrap_units(graph, policy, lambda unit, own: wrap(unit, **{**kwargs, **own}), module_is_root)


@contextmanager
def enable_wrap(auto_wrap_policy: AutoWrapPolicy | None = None, **kwargs: Any) -> Iterator[None]:
    """Have `wrap` and `auto_wrap` wrap inside of the context; outside of it they return their module unchanged.

    A model whose constructor calls `wrap(layer)` can so be built plain or sharded, and layer by layer, so
    that never more than one layer exists unsharded. The settings are those of the whole process, also for
    other threads, and are taken back when the context is left, by an exception too. Not a collective call;
    what `wrapper_cls` does may be one, so enter it on every rank with the same arguments.

    Args:
        auto_wrap_policy: used by every `auto_wrap` that brings no policy of its own; default:
            `default_auto_wrap_policy`. `wrap` does not ask it.
        **kwargs: `wrapper_cls` (required) is the class, or any callable, that takes a module and returns
            the wrapped one. `move_module_cuda_half=True` moves each module to the current accelerator and
            casts it to float16 before it is wrapped. All other keywords go to `wrapper_cls` untouched.

    Raises:
        ValueError: `wrapper_cls` is missing or can not be called.
        NotImplementedError: a context is active already.
    """
    with ConfigAutoWrap(auto_wrap_policy, **kwargs):
        yield


def wrap(module: nn.Module, **overrides: Any) -> nn.Module:
    """Wrap one module inside of `enable_wrap`; outside, return it unchanged.

    The wrapper's keywords are those of the context, then those in `module.wrapper_config` if the module has
    this attribute, then `overrides`; later ones win. Not a collective call; `wrapper_cls` may be one.

    A parameter that the module shares with others is not looked for: to keep it tied, wrap the module that
    contains all its uses, or use `auto_wrap`.

    Args:
        module: the module that becomes a unit, whatever its size.
        **overrides: keywords for this wrapper only.

    Raises:
        ValueError: `module.wrapper_config` is not a dict.
        RuntimeError: the context has `move_module_cuda_half=True` and there is no accelerator.
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
                f"move_module_cuda_half=True moves {type(module).__name__} to an accelerator, and torch sees none "
                "here. Leave the option out of enable_wrap on this machine."
            )
        module = module.to(device).half()
    return wrapper_cls(module, **{**ConfigAutoWrap.kwargs, **own_config, **overrides})


def wrapper_config_of(module: nn.Module) -> Mapping[str, Any]:
    """Return the keywords for the wrapper of a module that its attribute `wrapper_config` contains."""
    own_config = getattr(module, "wrapper_config", {})
    if not isinstance(own_config, Mapping):
        raise ValueError(
            f"{type(module).__name__}.wrapper_config is {own_config!r}; it must be a dict of keywords for "
            "the wrapper (an empty one to use the context's)."
        )
    return own_config


def auto_wrap(
    module: nn.Module, auto_wrap_policy: AutoWrapPolicy | None = None, *, keep_wrapped: bool = False, **kwargs: Any
) -> nn.Module:
    """Wrap what a policy picks among a module and everything in it; outside of `enable_wrap`, change nothing.

    The children are replaced in place and the module, wrapped or not, is returned; it is wrapped itself only
    if the policy picks it. A module that occurs several times is wrapped once, with the same wrapper in every
    place. Modules without any parameter are left alone. Not a collective call; `wrapper_cls` may be one, so
    call it on every rank with the same model and policy.

    Tied parameters stay tied: a module is not wrapped when it holds a parameter that is also used outside of
    it (a Parameter that several modules hold, or one in a module with several parents) and that is in no unit
    further inside. The parameter goes to the lowest unit that contains all its uses, or stays unwrapped if
    there is none, and one line at INFO of the logger `fsdp.wrap` says so. Only ties inside of `module` can
    be seen: if `module` shares a parameter with the rest of a bigger model, call `auto_wrap` on that model.

    Nothing is changed before the policy has been asked about everything, so a policy that raises leaves the
    module as it was. When `wrapper_cls` raises, the units that it has made already stay in place.

    Args:
        module: the root of what may be wrapped. It may not be wrapped by `wrapper_cls` yet, and neither may anything
            in it without `keep_wrapped`.
        auto_wrap_policy: `policy(module=, recurse=, unwrapped_params=, module_is_root=) -> bool`; default:
            the context's. It is asked with `recurse=True` from the top down whether to go into a module (no:
            neither the module nor anything in it is wrapped, also where that occurs elsewhere), then with
            `recurse=False` from the bottom up whether to wrap it. `unwrapped_params` counts the elements of
            the parameters that are in no inner unit, each parameter once. Instead of True it may answer with a dict
            of keywords for this wrapper, which win over all others: ``{"reshard_after_forward": False}``.
        keep_wrapped: leave what is wrapped already as it is, and wrap what is left: a policy that picks a module around
            it gets the rest. False refuses, as FairScale does.
        **kwargs: keywords for every wrapper made here; they win over the context's and a `wrapper_config`. What
            `ignored_modules` and `ignored_parameters` name, here or in the context, is not counted, and in no unit.

    Raises:
        ValueError: something inside is an instance of `wrapper_cls` already, is a lazy module that has not
            been run, or contains itself; or as `wrap` raises.
        RuntimeError: as `wrap` raises.
    """
    if not ConfigAutoWrap.in_autowrap_context:
        _warn_unwrapped("auto_wrap() outside of enable_wrap", module, _ENTER)
        return module
    wrapped, numel = ConfigAutoWrap.recursive_wrap(
        module, auto_wrap_policy, module_is_root=True, keep_wrapped=keep_wrapped, **kwargs
    )
    if not numel and not keep_wrapped and any(True for _ in module.parameters()):
        _warn_unwrapped("auto_wrap() with a policy that picks nothing in it", module, _PICK)
    return wrapped


_ENTER = "Call it inside of `with enable_wrap(wrapper_cls=FullyShardedDataParallel):`."
_PICK = "Give a policy that picks parts of it: fsdp.module_wrap_policy({Block}), or a smaller min_num_params."


def _warn_unwrapped(what: str, module: nn.Module, remedy: str) -> None:
    """Warn if several ranks run and nothing has been wrapped, so that each would train its own model."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{what} leaves this {type(module).__name__} as it is: unless it is wrapped otherwise, each of the "
            f"{dist.get_world_size()} ranks trains its own. {remedy}",
            stacklevel=3,
        )


def wrapped_in(root: nn.Module, wrapper_cls: Callable[..., nn.Module] | None, is_allowed: bool) -> list[nn.Module]:
    """Return the wrappers in a module, or raise ValueError for the first if none is allowed; the root may be none."""
    kind: Any = wrapper_cls
    while isinstance(kind, functools.partial):
        kind = kind.func
    if not isinstance(kind, type):
        return []  # a plain function: there is no telling what it returns
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


# --- what becomes a unit ----------------------------------------------------------------------------------------------


# Module._modules and _parameters are private by name only (tried on torch 2.11 and 2.13). The public
# iterators leave out the second place of a module or parameter that occurs twice, which is what matters here.
def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


class ModuleGraph:
    """The modules and parameters below a module, which may occur more than once, without what is ignored."""

    def __init__(self, root: nn.Module, ignored: Ignored) -> None:
        self.root = root
        self._ignored = ignored
        self.modules: list[nn.Module] = []  # children before parents, each once
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {root: []}  # (parent, name in it)
        self.holders: Counter[nn.Parameter] = Counter()  # modules that list a parameter themselves
        self.uses: dict[nn.Module, Counter[nn.Parameter]] = {}  # paths from a module to each parameter in it
        self._visit(root, "")
        self._paths = Counter({root: 1})  # from the root
        for module in reversed(self.modules):  # parents before children
            self._paths[module] += sum(self._paths[parent] for parent, _ in self.places[module])

    @classmethod
    def without(cls, root: nn.Module, wrapped: Iterable[nn.Module], options: Mapping[str, Any]) -> ModuleGraph:
        """Return the graph without the given wrappers, and without what the options of a wrapper ignore."""
        ignored = Ignored.of(options.get("ignored_modules"), options.get("ignored_parameters"))
        return cls(root, ignored | Ignored.of(wrapped, None))

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
                raise ValueError(f"{join(path, name)!r} contains itself. Take it out there.")
            self.places[child].append((module, name))
            inside.update(self.uses[child])
        self.uses[module] = inside
        self.modules.append(module)

    def children(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules in a module, without those that are ignored."""
        children = module._modules.items()
        return [(name, child) for name, child in children if child is not None and child not in self._ignored.modules]

    def contains_every_use(self, module: nn.Module, parameter: nn.Parameter) -> bool:
        """Return True if every path from the root to the parameter goes through the module."""
        return self._paths[module] * self.uses[module][parameter] == self.uses[self.root][parameter]


@dataclass(frozen=True)
class WrapPlan:
    units: dict[nn.Module, Mapping[str, Any]]  # inner ones before those around them, with keywords that the policy gave
    owner: dict[nn.Parameter, nn.Module]  # the unit that takes each parameter; absent: it stays unwrapped
    turned_down: dict[nn.Parameter, list[nn.Module]]  # what each tie kept from becoming a unit


def make_plan(graph: ModuleGraph, policy: AutoWrapPolicy, module_is_root: bool) -> WrapPlan:
    """Ask the policy, from the bottom up, about the modules that it lets us look into; see `auto_wrap`."""
    plan = WrapPlan({}, {}, {})
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
        # What was entered in one place may lie in a shut module in another, and stays unwrapped for its sake.
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


def wrap_units(
    graph: ModuleGraph,
    policy: AutoWrapPolicy,
    make_unit: Callable[[nn.Module, Mapping[str, Any]], nn.Module],
    module_is_root: bool = True,
) -> tuple[nn.Module, int]:
    """Wrap what a policy picks, inner modules first.

    `make_unit` is called with each module and the keywords that the policy gave for it. Returns the root, wrapped or
    not, and the number of elements that are in a unit now.
    """
    plan = make_plan(graph, policy, module_is_root)
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
    """Log a line at INFO for every parameter with several holders, or that kept a module from being wrapped."""
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
