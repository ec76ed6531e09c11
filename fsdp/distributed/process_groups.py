"""Process groups as users give them: what they serve, and which ones stand for those that were not given."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.distributed as dist


class Group(Protocol):
    """What we need of a process group; dummies with only these two serve for a world of one."""

    def rank(self) -> int: ...
    def size(self) -> int: ...


def behind(group: Any) -> Any:
    """The group that torch knows: `group` itself, or the one that an object of the user's stands before."""
    if dist.is_available() and not isinstance(group, dist.ProcessGroup):
        held = getattr(group, "__dict__", {}).values()
        return next((each for each in held if isinstance(each, dist.ProcessGroup)), group)
    return group


def backend_names(group: Any) -> dict[str, str]:
    """Backend by device type, e.g. ``{"cpu": "gloo", "cuda": "nccl"}``; empty for a proxy that torch doesn't know."""
    try:
        config = dist.get_backend_config(behind(group))
    except (ValueError, RuntimeError, AttributeError, TypeError):
        return {}
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def number_of_groups() -> int:
    """How many process groups this rank is in.

    Private in torch (seen in 2.11 and 2.13), which names a group that only its members make by it; ranks that are in
    different numbers of groups would wait for each other for ever. -1 where torch keeps it elsewhere.
    """
    return len(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", ())) or -1


def default_group(group: Group | None) -> Group:
    """`group`, or the group of all ranks; an error that says how to make one if there is none."""
    if group is not None:
        if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
            raise TypeError(
                f"process_group must be a process group that this rank is in, got {group!r}. (dist.new_group returns a "
                "number on ranks that are not in the group: wrap the module only on its members.)"
            )
        return group
    if dist.is_available() and dist.is_initialized():
        return cast(Group, dist.group.WORLD)
    raise RuntimeError(
        "FullyShardedDataParallel needs a process group and torch.distributed is not initialized. Start the script "
        "with torchrun and put these two lines before the model is wrapped:\n"
        "    import torch.distributed as dist\n"
        '    dist.init_process_group("gloo")  # "nccl" where the model is on GPUs'
    )


def served_device(group: Group) -> torch.device:
    """Where to compute if nothing else tells: the current GPU if `group` serves GPUs and there is one, else the CPU."""
    if "cuda" in backend_names(group) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reduce_group(group: Group, device: torch.device) -> Group:
    """The group for gradients when the user names none.

    On NCCL a second communicator over all ranks, so that reductions do not queue behind gathers (collective over all
    ranks the first time); elsewhere, and for a group of the user's own, the same group.
    """
    if dist.is_initialized() and group is dist.group.WORLD and backend_names(group).get(device.type) == "nccl":
        if (group, "reduce") not in _second_groups:
            _second_groups[group, "reduce"] = dist.new_group()
        return _second_groups[group, "reduce"]
    return group


_second_groups: dict[tuple[Any, str], Any] = {}
