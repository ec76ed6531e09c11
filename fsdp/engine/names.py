"""FQNs as users know them, without the path parts that wrappers add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from torch import nn

FSDP_PART = "_fsdp_wrapped_module"
FLATTEN_PART = "_fpw_module"
_PARTS = frozenset((FSDP_PART, FLATTEN_PART))


# Name parts added by torch's wrappers for compiled modules and activation checkpointing.
_CHECKPOINT_PART = "_checkpoint_wrapped_module"
WRAPPER_PARTS = _PARTS | {"_orig_mod", _CHECKPOINT_PART}


def clean_text(text: str) -> str:
    """Return a message with all names in it cleaned."""
    for part in _PARTS:
        text = text.replace(f"{part}.", "")
    return text


def clean_name(name: str, parts: frozenset[str] = _PARTS) -> str:
    """Return `name` without parts added by wrappers: ``a._fsdp_wrapped_module._fpw_module.b`` is ``a.b``."""
    split = name.split(".")
    return name if parts.isdisjoint(split) else ".".join(part for part in split if part not in parts)


def module_name(name: str) -> str:
    """Return a module's name without the wrappers' path parts.

    A `FlattenParamsWrapper` keeps its own part, so that the name of a flat parameter can be recognized:
    ``a._fsdp_wrapped_module.flat_param_0``.
    """
    return f"{name}.".replace(f"{FSDP_PART}.{FLATTEN_PART}.", "")[:-1]


def state_name(name: str) -> str:
    """Return `clean_name` without the part that torch's checkpoint wrapper omits in ``state_dict()``."""
    return ".".join(part for part in clean_name(name).split(".") if part != _CHECKPOINT_PART)


def plain_name(name: str) -> str:
    """Return `clean_name` without the parts of torch's wrappers: the name in the original model."""
    return clean_name(name, WRAPPER_PARTS)


def foreign_prefix(names: Iterable[str], is_own: Callable[[str], bool]) -> str:
    """Return the prefix, such as ``module.``, that all names of a state and no names of the model (`is_own`) have."""
    split = [clean_name(name).split(".") for name in names]
    first = split[0] if split else []
    foreign = list(takewhile(lambda part: not is_own(part), first))
    found = 0 < len(foreign) < len(first) and all(parts[: len(foreign)] == foreign for parts in split)
    return "".join(f"{part}." for part in foreign) if found else ""


def prefix_problem(prefix: str, remedy: str) -> str:
    """Return the error message for a state whose names all have a prefix."""
    return (
        f"every key begins with {prefix!r}, unlike the names in this model (DistributedDataParallel adds 'module.', "
        f"torch.compile '_orig_mod.'): {remedy}"
    )


def wrapped_problem(names: Iterable[str]) -> str:
    """Return the error message for a state with path parts of wrappers in its names; empty if there are none."""
    wrapped = next((name for name in names if clean_name(name) != name), None)
    if wrapped is None:
        return ""
    removed = "".join(f".replace('{part}.', '')" for part in (FSDP_PART, FLATTEN_PART) if f"{part}." in wrapped)
    return (
        f"keys such as {wrapped!r} have path parts that wrappers add, as in torch's named_parameters(): "
        f"load {{key{removed}: value for key, value in state_dict.items()}}"
    )


def join(path: str, name: str) -> str:
    """Return the full name of `name` in the module at `path`, which is empty for the root."""
    return f"{path}.{name}" if path else name


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a tree with their clean names, each once, outer before inner.

    Unlike the method of `nn.Module`, without a generator for each level of the tree.
    """
    found: set[nn.Module] = set()
    ahead = [("", root)]
    while ahead:
        path, module = ahead.pop()
        if module not in found:
            found.add(module)
            yield path, module
            for name, inner in reversed([*module._modules.items()]):
                if inner is not None:
                    ahead.append((path if name in _PARTS else join(path, name), inner))


def paths_in(root: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the prefixes of each module's tensors (``a.b.``), one for each place of the module."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(join(clean_name(name), ""))
    return paths
