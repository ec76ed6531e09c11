"""`shard` makes the given modules and the whole model units in a single call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from fsdp.engine.forward_hooks import has_forward
from fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp.layers.foreign_names import refuses_keywords
from fsdp.wrap import AutoWrapPolicy, ModuleGraph, lambda_wrap_policy, wrap_units, wrapped_in, wrapper_config_of


@refuses_keywords
def shard(
    module: nn.Module, units: Iterable[type[nn.Module] | nn.Module] | AutoWrapPolicy, **options: Any
) -> FullyShardedDataParallel:
    """Collective. Shard a model: each of its `units`, and the model itself for all other parameters. ::

        model = fsdp.shard(Model(), units={Block}, use_orig_params=True)

    The units are replaced in place by their wrappers, inner units first, and the wrapper of the model is returned.
    Create the optimizer afterwards, from ``model.parameters()``. Tied parameters stay tied, as with `fsdp.auto_wrap`: a
    module that shares a parameter with a module outside it does not become a unit. Modules that are already wrapped
    keep their wrappers and options.

    Args:
        module: the plain model, the same on every rank.
        units: the classes of the modules that become units, subclasses included, such as the model's transformer
            block. Modules of the model are accepted too: ``units=model.blocks``. For any other rule, a policy as for
            `fsdp.auto_wrap`.
        **options: options of `FullyShardedDataParallel`, for all units and the model. A policy's keywords for a unit,
            and its `wrapper_config`, take precedence.

    Raises:
        ValueError: if a class in `units` occurs nowhere in the model, or a module in it is not in the model; if `units`
            is empty or names modules without a forward; if `module` is wrapped already; or as the wrapper raises.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError("fsdp.shard: this model is wrapped already. Pass the plain model, before it is wrapped.")
    policy = _policy(module, units)

    def wrapped(unit: nn.Module, own: Mapping[str, Any]) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(unit, **{**options, **wrapper_config_of(unit), **own})

    graph = ModuleGraph(module, wrapped_in(module, FullyShardedDataParallel, is_allowed=True), options)
    root, _ = wrap_units(graph, policy, wrapped)
    return root if isinstance(root, FullyShardedDataParallel) else wrapped(root, {})


def _policy(module: nn.Module, units: Any) -> AutoWrapPolicy:
    if isinstance(units, Iterable) and not isinstance(units, (str, type, Mapping)):
        return _policy_of_names(module, tuple(units))
    if callable(units) and not isinstance(units, (type, nn.Module)):
        return units
    raise ValueError(
        "fsdp.shard takes a set of classes or modules as units, e.g. units={Block}, or a policy, which is a function "
        f"(lambda_wrap_policy(f) instead of torch's CustomPolicy(f)); got {units!r}."
    )


def _policy_of_names(module: nn.Module, units: tuple[Any, ...]) -> AutoWrapPolicy:
    if not units:
        raise ValueError(
            "fsdp.shard got no units, so the model would be unsharded as a whole whenever it runs. Pass the class of "
            "its layers, or call FullyShardedDataParallel(model) to make the whole model one unit."
        )
    inside = set(module.modules())
    for unit in units:
        is_class = isinstance(unit, type) and issubclass(unit, nn.Module)
        if not is_class and not isinstance(unit, nn.Module):
            raise ValueError(f"fsdp.shard takes nn.Module classes and modules as units, found {unit!r} among them.")
        found = [each for each in inside if isinstance(each, unit)] if is_class else [*inside.intersection([unit])]
        shown = _name(unit) if is_class else f"the {_name(type(unit))} among the units"
        if not found:
            raise ValueError(
                f"fsdp.shard: {shown} occurs nowhere in this {type(module).__name__}. The classes of its modules: "
                f"{_classes_in(module)}."
            )
        if not any(map(has_forward, found)):
            raise ValueError(
                f"fsdp.shard: {shown} has no forward, so its unit would never run. Pass the class of the modules in it."
            )
    classes = tuple(unit for unit in units if isinstance(unit, type))
    chosen = {unit for unit in units if isinstance(unit, nn.Module)}
    return lambda_wrap_policy(lambda each: isinstance(each, classes) or each in chosen)


def _classes_in(module: nn.Module) -> str:
    """Return the classes that could be units, with the number of their modules, in the order in which they occur."""
    found = Counter(
        type(each) for each in module.modules() if has_forward(each) and any(True for _ in each.parameters())
    )
    return ", ".join(f"{_name(cls)} ({count})" for cls, count in found.items())


def _name(cls: type[nn.Module]) -> str:
    return cls.__qualname__ if cls.__module__.startswith("torch.nn.") else f"{cls.__module__}.{cls.__qualname__}"
