"""Compare the names of `torch.distributed.fsdp` for FSDP2 with ours, as a table for docs/fully_shard.md.

    python -m tests.tools.compare_fsdp2            # print the table
    python -m tests.tools.compare_fsdp2 --write    # put it in the page

`test_surface.py` compares the page with what is installed, whichever torch that is.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as torchs

import fsdp

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "fully_shard.md"
BEGIN, END = "<!-- begin: python -m tests.tools.compare_fsdp2 --write -->", "<!-- end -->"
NEW_SINCE_2_11 = {
    "DataParallelMeshDims",
    "DataParallelMeshDims.replicate_names",
    "DataParallelMeshDims.shard_names",
    "FSDPModule.finalize_backward",
    "FSDPModule.reset_iter_state",
    "FSDPModule.set_keep_unsharded_storage",
    "FSDPModule.set_manual_backward_finalization",
    "FSDPModule.set_reduce_scatter_max_input_buffers",
    "FSDPModule.set_reduce_scatter_unused_params",
    "FSDPModule.set_separate_reduce_scatter_group",
    "FSDPModule.set_symm_mem_for_comm",
    "GradientReductionHandle",
    "GradientReductionHandle.wait",
    "MixedPrecisionPolicy(param_dtype_override_fn)",
    "fully_shard(dp_mesh_dims)",
}
NAMES = (
    "fully_shard",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "GradientReductionHandle",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
# Each difference with its reason; of names that are here and behave as torch's, nothing is said.
DIFFERENCES = {
    "fully_shard": "also supports ties, multiple dtypes, no dimensions, uneven shards of any dimension; raises an "
    "error at once for modules without their own forward",
    "fully_shard(mesh)": "None does not create a default process group",
    "fully_shard(reshard_after_forward)": "the last module of a forward keeps its parameters for backward: one "
    "all-gather less",
    "fully_shard(shard_placement_fn)": "modules with parameters on a different mesh become separate sharded modules",
    "fully_shard(ignored_params)": "any iterable",
    "fully_shard(dp_mesh_dims)": "parameters may be plain tensors, or `DTensor`s on the other dimensions only",
    "fully_shard(placements)": "only in this library",
    "CPUOffloadPolicy(pin_memory)": "host memory is always pinned if there is an accelerator: False is an error",
    "FSDPModule.unshard": "meanwhile, `parameters()` of inner modules that are not sharded separately list `DTensor`s",
    "FSDPModule.reset_iter_state": "also drops reduced gradients, like torch's since 2.15; without this call, the next "
    "forward discards a failed pass",
    "FSDPModule.finalize_backward": "gradients of a backward with synchronization are complete before; all gradients "
    "are complete when the call returns, also with `async_op=True`",
    "FSDPModule.set_manual_backward_finalization": "the same as `set_is_last_backward(False)`",
    "FSDPModule.set_is_last_backward": "each backward leaves complete gradients; after False, `parameters()` lists "
    "unsharded parameters while gradients accumulate",
    "FSDPModule.set_reshard_after_backward": "an optimizer step frees parameters that are still unsharded; torch's "
    "modules compute with the old values until they are resharded",
    "FSDPModule.set_requires_gradient_sync": "`zero_grad()` drops accumulated unsharded gradients, which torch's keep; "
    "a step or clipping without them is an error",
    "FSDPModule.set_force_sum_reduction_for_comms": "no effect: all collectives sum",
    "FSDPModule.set_all_reduce_hook": "the gradient is the average in every dtype; the hook is called for the modules "
    "of a bucket in their order in the model",
    "FSDPModule.set_custom_all_gather": "called with `async_op=True`",
    "FSDPModule.set_custom_reduce_scatter": "called with `async_op=True`, and always with `ReduceOp.SUM`",
    "FSDPModule.set_post_optim_event": "the current stream waits for the event; all-gathers are ordered after this "
    "stream",
    "FSDPModule.set_reduce_scatter_max_input_buffers": "the number of reductions in flight while another starts",
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": "an error on NCCL, because all-gathers of large "
    "units write directly to the parameters' memory; elsewhere no effect, like torch's",
    "FSDPModule.set_symm_mem_for_comm": "an error, for the same reason",
    "FSDPModule.set_unshard_in_backward": "an error of autograd if backward requires the parameters",
    "FSDPModule.set_gradient_divide_factor": "also supports gloo",
    "FSDPModule.set_reduce_scatter_unused_params": "not required for parameters that only some ranks use",
    "share_comm_ctx": "no effect: there are no communication streams",
}
# Arguments of ours that have another default than torch's, with the reason; there are none.
OTHER_DEFAULTS: dict[str, str] = {}


def surface(module: Any) -> dict[str, str]:
    """Return each name, method and argument of FSDP2 in a module, with its default as text."""
    found: dict[str, str] = {}
    for name in NAMES:
        if hasattr(module, name):
            found |= dict(_of_one(name, getattr(module, name)))
    return found


def _of_one(name: str, each: Any) -> Iterator[tuple[str, str]]:
    yield name, ""
    if not inspect.isclass(each):
        yield from _arguments(name, each)
        return
    if dataclasses.is_dataclass(each):
        yield from _arguments(name, each)
    for method, function in vars(each).items():
        if not method.startswith("_") and (callable(function) or isinstance(function, property)):
            yield f"{name}.{method}", ""
            if callable(function):
                yield from _arguments(f"{name}.{method}", function)


def _arguments(name: str, function: Any) -> Iterator[tuple[str, str]]:
    for argument in inspect.signature(function).parameters.values():
        if argument.name != "self" and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            star = "*" if argument.kind is argument.KEYWORD_ONLY else ""
            default = "" if argument.default is argument.empty else _shown(argument.default)
            yield f"{name}({argument.name})", f"{star}{default}"


def _shown(default: Any) -> str:
    return f"{type(default).__name__}()" if dataclasses.is_dataclass(default) else repr(default)


def differences() -> list[str]:
    """Return what the installed torch has and we have not, or otherwise, and for which no reason is given."""
    ours, wrong = surface(fsdp), []
    for name, default in surface(torchs).items():
        if name not in ours:
            wrong.append(f"{name} is missing")
        elif ours[name] != default and name not in OTHER_DEFAULTS:
            wrong.append(f"{name} is {ours[name]!r} here and {default!r} in torch's")
    return wrong


def table() -> str:
    """Return the table of all of our names that are torch's, with their arguments."""
    rows = ["| name | since torch 2.11 | differs from torch's |", "|---|---|---|"]
    known = {*surface(torchs), *NEW_SINCE_2_11}
    signatures: dict[str, list[str]] = {}
    for name, default in surface(fsdp).items():
        owner, _, argument = name.rstrip(")").partition("(")
        if owner in known:
            signatures.setdefault(owner, []).extend([_as_written(argument, default)] if argument else [])
    for owner, arguments in signatures.items():
        new = [name.partition("(")[2].rstrip(")") for name in NEW_SINCE_2_11 if name.partition("(")[0] == owner]
        since = "yes" if "" in new else ", ".join(f"`{name}`" for name in new)
        of_it = [(name, text) for name, text in DIFFERENCES.items() if name.partition("(")[0] == owner]
        texts = [f"`{name.partition('(')[2][:-1]}`: {text}" if "(" in name else text for name, text in of_it]
        rows.append(f"| `{owner}({', '.join(_with_star(arguments))})` | {since} | {'; '.join(texts)} |")
    return "\n".join(rows)


def _as_written(argument: str, default: str) -> str:
    value = default.removeprefix("*")
    return ("*" if default.startswith("*") else "") + argument + (f"={value}" if value else "")


def _with_star(arguments: list[str]) -> list[str]:
    """Return arguments as a signature has them: those by name only after one star."""
    first = next((number for number, each in enumerate(arguments) if each.startswith("*")), len(arguments))
    stars = ["*"] if first < len(arguments) else []
    return [*arguments[:first], *stars, *(each.removeprefix("*") for each in arguments[first:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table in docs/fully_shard.md")
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")
    else:
        print(table())


if __name__ == "__main__":
    main()
