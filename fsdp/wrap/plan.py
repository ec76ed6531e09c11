"""`make_plan` settles which modules of a tree become units, before the first wrapper is made.

A wrapper takes its module's parameters away, so whatever depends on the original tree has to be known before.
Here a policy is asked and ties are found; nothing is changed.

Ties. A unit may take a parameter only if it contains every use of it: otherwise the modules outside would
keep a tensor that nobody updates any more. The tree is really a graph, in which a module may have several
parents and a parameter several holders. So "module M contains every use of p" means that every path from the
root to p goes through M: M *dominates* p. The graph has no cycles, hence the nearest dominator of a module is
where the dominators of its parents meet (`_meet`), and one pass from the root downwards finds them all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from fsdp.engine.managed_params import Ignored

_log = logging.getLogger("fsdp.wrap")

# Called with the keywords module, recurse, unwrapped_params, module_is_root.
AutoWrapPolicy = Callable[..., bool]


# Module._modules and _parameters are private by name only (tried on torch 2.11 and 2.13). The public
# iterators leave out the second place of a module or parameter that occurs twice, which is what matters here.
def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class ModuleGraph:
    """The modules and parameters below a module, which may occur more than once, without what is ignored."""

    def __init__(self, root: nn.Module, ignored: Ignored) -> None:
        self.root = root
        self._ignored = ignored
        self.modules: list[nn.Module] = []  # children before parents, each once
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {root: []}  # (parent, name in it)
        self.holders: dict[nn.Parameter, list[nn.Module]] = {}
        self.parameters: dict[nn.Module, dict[nn.Parameter, None]] = {}  # of the whole subtree, each once
        self._visit(root, "")

        self._dominator: dict[nn.Module, nn.Module] = {}  # the nearest one
        self._depth = {root: 0}  # in the tree of dominators
        for module in reversed(self.modules[:-1]):  # parents before children
            self._dominator[module] = self._meet([parent for parent, _ in self.places[module]])
            self._depth[module] = self._depth[self._dominator[module]] + 1

    def _visit(self, module: nn.Module, path: str) -> None:
        inside: dict[nn.Parameter, None] = {}
        for name, parameter in _own_parameters(module):
            if self._ignored.has(module, parameter):
                continue
            if is_lazy(parameter):
                raise ValueError(
                    f"auto_wrap can not count {_join(path, name)!r}: {type(module).__name__} has not seen "
                    "its input yet. Run the model once before wrapping it."
                )
            inside[parameter] = None
        for parameter in inside:
            self.holders.setdefault(parameter, []).append(module)
        for name, child in self.children(module):
            if child not in self.places:
                self.places[child] = []
                self._visit(child, _join(path, name))
            elif child not in self.parameters:  # still being visited, further up
                raise ValueError(f"{_join(path, name)!r} contains itself. Take it out there.")
            self.places[child].append((module, name))
            inside |= self.parameters[child]
        self.parameters[module] = inside
        self.modules.append(module)

    def children(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules in a module, without those that are ignored."""
        return [(name, child) for name, child in _children(module) if child not in self._ignored.modules]

    def _meet(self, modules: list[nn.Module]) -> nn.Module:
        """Return the nearest module that dominates all of these, each module counting as dominating itself."""
        meeting, *others = modules
        for other in others:
            while meeting is not other:
                if self._depth[meeting] > self._depth[other]:
                    meeting = self._dominator[meeting]
                else:
                    other = self._dominator[other]
        return meeting

    def contains_every_use(self, module: nn.Module, parameter: nn.Parameter) -> bool:
        return self._meet([module, *self.holders[parameter]]) is module

    def module_names(self) -> dict[nn.Module, str]:
        """Return the first name of every module, quoted and with its class, for messages."""
        names = {module: f"{name!r} ({type(module).__name__})" for name, module in self.root.named_modules()}
        return names | {self.root: f"'' (the root, {type(self.root).__name__})"}

    def parameter_names(self) -> dict[nn.Parameter, list[str]]:
        """Return all names of every parameter."""
        names: dict[nn.Parameter, list[str]] = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            for name, parameter in _own_parameters(module):
                names.setdefault(parameter, []).append(_join(path, name))
        return names


@dataclass(frozen=True)
class WrapPlan:
    units: list[nn.Module]  # inner units before the ones around them
    owner: dict[nn.Parameter, nn.Module]  # the unit that takes each parameter; absent: it stays unwrapped
    turned_down: dict[nn.Parameter, list[nn.Module]]  # what each tie kept from becoming a unit


def make_plan(graph: ModuleGraph, policy: AutoWrapPolicy, module_is_root: bool) -> WrapPlan:
    """Ask the policy, from the bottom up, about the modules that it lets us look into; see `auto_wrap`."""
    plan = WrapPlan([], {}, {})
    entered = _modules_to_enter(graph, policy, module_is_root)
    for module in graph.modules:
        if module not in entered:
            continue
        left = [p for p in graph.parameters[module] if p not in plan.owner]
        wanted = policy(
            module=module,
            recurse=False,
            unwrapped_params=sum(p.numel() for p in left),
            module_is_root=module_is_root and module is graph.root,
        )
        if not wanted or not graph.parameters[module]:
            continue
        used_outside = [p for p in left if not graph.contains_every_use(module, p)]
        for parameter in used_outside:
            plan.turned_down.setdefault(parameter, []).append(module)
        if not used_outside:
            plan.units.append(module)
            plan.owner.update(dict.fromkeys(left, module))
    return plan


def _modules_to_enter(graph: ModuleGraph, policy: AutoWrapPolicy, module_is_root: bool) -> set[nn.Module]:
    entered: set[nn.Module] = set()
    shut: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in entered or module in shut:
            return
        go_down = policy(
            module=module,
            recurse=True,
            unwrapped_params=sum(p.numel() for p in graph.parameters[module]),
            module_is_root=module_is_root and module is graph.root,
        )
        if not go_down:
            shut.update(module.modules())
            return
        entered.add(module)
        for _, child in graph.children(module):
            visit(child)

    visit(graph.root)
    # What was entered in one place may lie in a shut module in another, and stays unwrapped for its sake.
    return entered - shut


def log_ties(graph: ModuleGraph, plan: WrapPlan) -> None:
    """Log a line at INFO for every parameter with several holders, or that kept a module from being wrapped."""
    tied = [p for p, holders in graph.holders.items() if len(holders) > 1 or p in plan.turned_down]
    if not tied or not _log.isEnabledFor(logging.INFO):
        return
    modules, parameters = graph.module_names(), graph.parameter_names()
    for parameter in tied:
        owner = plan.owner.get(parameter)
        where = f"unit {modules[owner]}" if owner else f"{modules[graph.root]}, outside of all units in it"
        turned_down = [modules[module] for module in plan.turned_down.get(parameter, [])]
        suffix = f"; not wrapped because of it: {', '.join(turned_down)}" if turned_down else ""
        _log.info("tied parameter %s stays in %s%s", " = ".join(parameters[parameter]), where, suffix)
