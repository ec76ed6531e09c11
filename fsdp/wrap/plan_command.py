"""The command ``fsdp plan``: `fsdp.plan` for a model that a user-defined function creates."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.cli import FINE, WRONG, UsageError, add_command
from fsdp.engine.precision import MixedPrecision
from fsdp.wrap import lambda_wrap_policy
from fsdp.wrap.plan import Plan, plan
from fsdp.wrap.plan_wrapping import plan_wrapping

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PLAN = (
    "Print what the training of a model needs on each rank: memory by phase, bytes on the wire, collectives.\nNothing "
    "is allocated: the model is created on the meta device, and the other ranks are simulated."
)


def add_plan(commands: Any) -> None:
    """Add the command to a parser."""
    command = add_command(commands, "plan", _PLAN)
    command.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help=(
            "A function without arguments that returns the plain model, or a pair of the model and its input (a "
            "tensor, a tuple of arguments, or a dictionary of keywords). Without an input, activations are not counted."
        ),
    )
    command.add_argument("--world-size", type=int, required=True, metavar="N", help="The number of ranks.")
    command.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="The number of ranks that hold the same shard; 1 by default.",
    )
    command.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="CLASS",
        help="Make each module of this class a unit. May be repeated.",
    )
    command.add_argument("--keep", action="store_true", help="Keep parameters unsharded from forward to backward.")
    command.add_argument("--offload", action="store_true", help="Keep parameters and optimizer state on the host.")
    command.add_argument("--dtype", choices=_DTYPES, help="Compute and communicate in this dtype.")
    command.add_argument(
        "--optimizer", default="AdamW", metavar="CLASS", help="A class of torch.optim; AdamW by default."
    )
    command.add_argument(
        "--backend", default="gloo", help="The backend of the process group, such as nccl; gloo by default."
    )
    command.add_argument(
        "--bandwidth", type=float, metavar="GB", help="The rate at which a rank sends, in GB (10^9 bytes) per second."
    )
    command.add_argument(
        "--budget",
        type=float,
        metavar="GIB",
        help="Choose units that take at most this number of GiB (2^30 bytes) on each rank, with the fewest bytes on "
        "the wire. The exit code is 1 if no units do.",
    )
    command.add_argument("--json", action="store_true", help="Print JSON.")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace, choices: Any) -> int:
    model, sample = _made(args.factory)
    names = {type(module).__name__ for module in model.modules()}
    for name in args.unit:
        if name not in names:
            raise UsageError(f"--unit {name}: the model has no module of this class, but of {', '.join(sorted(names))}")
    if args.budget is not None and (args.unit or args.keep):
        raise UsageError("--budget chooses units and whether they are kept: omit --unit and --keep")
    options: dict[str, Any] = {
        "sample": sample,
        "optimizer": _optimizer(args.optimizer),
        "replicas": args.replicas,
        "backend": args.backend,
        "bandwidth": args.bandwidth and args.bandwidth * 1e9,
        "mixed_precision": MixedPrecision(param_dtype=getattr(torch, args.dtype)) if args.dtype else False,
        "offload": "cpu" if args.offload else None,
    }
    if args.budget is not None:
        wrapping = plan_wrapping(model, args.world_size, args.budget * 2**30, **options)
        remedies = {name: _data(one) for name, one in wrapping.remedies.items()}
        data = {"units": dict(wrapping.units), "missing": wrapping.missing, "plan": _data(wrapping.plan)}
        print(json.dumps({**data, "remedies": remedies}, indent=1) if args.json else wrapping)
        return FINE if wrapping.fits else WRONG
    policy = lambda_wrap_policy(lambda module: type(module).__name__ in args.unit) if args.unit else None
    planned = plan(model, args.world_size, auto_wrap_policy=policy, reshard_after_forward=not args.keep, **options)
    print(json.dumps(_data(planned), indent=1) if args.json else planned)
    return FINE


def _data(planned: Plan) -> dict[str, Any]:
    computed = ("peak", "host_peak", "seconds_of_communication")
    return {**asdict(planned), **{name: getattr(planned, name) for name in computed}}


def _made(factory: str) -> tuple[nn.Module, Any]:
    """Return the model that ``module:function`` creates on the meta device, and its sample or None."""
    module, _, function = factory.partition(":")
    if not (module and function):
        raise UsageError(
            f"pass a module and its function that returns the model, as in train:make_model; got {factory}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`; an installed command does not add the current folder
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{factory}: {error}") from error
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise UsageError(f"{factory} raised {type(error).__name__} on the meta device: {error}") from error
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or isinstance(sample, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"{factory} returned {kind}: return an nn.Module, or a pair of one and a sample of its input")
    return model, sample


def _optimizer(name: str) -> Any:
    known: Mapping[str, Any] = vars(torch.optim)
    found = known.get(name)
    is_known = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    if not is_known or found is torch.optim.Optimizer:
        raise UsageError(f"--optimizer {name}: torch.optim has no optimizer of this name")
    return found
