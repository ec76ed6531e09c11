"""The command ``fsdp plan``: `fsdp.plan` of a model that a function of the user's makes."""

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

from fsdp.checkpoint.cli import FINE, UsageError
from fsdp.engine.precision import MixedPrecision
from fsdp.wrap import lambda_wrap_policy
from fsdp.wrap.plan import plan

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PLAN = (
    "tell what training a model takes on each rank: memory by phase, bytes on the wire, collectives\n"
    "Nothing is allocated: the model is made on the meta device, and the other ranks are imagined."
)


def add_plan(commands: Any) -> None:
    """Add the command to those of a parser."""
    command = commands.add_parser("plan", help=_PLAN.splitlines()[0], description=_PLAN)
    command.add_argument(
        "factory",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the plain model, or a pair: the model, and what it is called "
        "with (a tensor, a tuple of arguments, or a dictionary of keywords), without which activations are left out",
    )
    command.add_argument("--world-size", type=int, required=True, metavar="N", help="how many ranks there are")
    command.add_argument("--replicas", type=int, default=1, metavar="N", help="how many ranks hold the same shard")
    command.add_argument(
        "--unit", action="append", default=[], metavar="CLASS", help="make the modules of this class units; repeatable"
    )
    command.add_argument("--keep", action="store_true", help="keep parameters unsharded from forward to backward")
    command.add_argument("--dtype", choices=_DTYPES, help="compute and communicate in it")
    command.add_argument("--optimizer", default="AdamW", metavar="CLASS", help="of torch.optim; AdamW without it")
    command.add_argument("--backend", default="gloo", help="gloo, or another one, such as nccl; gloo without it")
    command.add_argument("--bandwidth", type=float, metavar="GB", help="in which a rank sends, in GB (10^9) per second")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace, choices: Any) -> int:
    model, sample = _made(args.factory)
    names = {type(module).__name__ for module in model.modules()}
    for name in args.unit:
        if name not in names:
            raise UsageError(f"--unit {name}: the model has no module of this class, but of {', '.join(sorted(names))}")
    precision = MixedPrecision(param_dtype=getattr(torch, args.dtype)) if args.dtype else False
    planned = plan(
        model,
        args.world_size,
        auto_wrap_policy=lambda_wrap_policy(lambda module: type(module).__name__ in args.unit) if args.unit else None,
        sample=sample,
        optimizer=_optimizer(args.optimizer),
        replicas=args.replicas,
        backend=args.backend,
        bandwidth=args.bandwidth and args.bandwidth * 1e9,
        reshard_after_forward=not args.keep,
        mixed_precision=precision,
    )
    if args.json:
        also = ("peak", "host_peak", "seconds_of_communication")
        computed = {name: getattr(planned, name) for name in also}
        print(json.dumps({**asdict(planned), **computed}, indent=1))
    else:
        print(planned)
    return FINE


def _made(factory: str) -> tuple[nn.Module, Any]:
    """Return the model that ``module:function`` makes on the meta device, and the sample that comes with it or None."""
    module, _, function = factory.partition(":")
    if not (module and function):
        raise UsageError(f"say which function of which module makes the model, as in train:make_model; got {factory}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it, and an installed command has not
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{factory}: {error}") from error
    with torch.device("meta"):
        made = make()
    model, sample = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module) or isinstance(sample, nn.Module):
        kind = type(model).__name__
        raise UsageError(f"{factory} returned {kind}: return an nn.Module, or a pair of one and a sample of its input")
    return model, sample


def _optimizer(name: str) -> Any:
    known: Mapping[str, Any] = vars(torch.optim)
    found = known.get(name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"--optimizer {name}: torch.optim has no optimizer of this name")
    return found
