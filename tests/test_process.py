"""Effects of importing and wrapping on the rest of the process: functions of others, hooks, threads, sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad, convert_parameters, parametrizations, prune  # noqa: F401 - loads weight_norm

from fsdp import FullyShardedDataParallel
from fsdp.layers import torch_functions
from tests.helpers.ranks import RankPool

# Imports the package in a process in which all that others register has been registered, and prints what it has done.
IMPORTING = """
import atexit, json, os, sys, threading, warnings
import torch, torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations, prune
registered = []
for module, name in ((atexit, "register"), (os, "register_at_fork"), (os, "putenv"), (threading.Thread, "start")):
    setattr(module, name, lambda *args, name=name, **kwargs: registered.append(name))
spaces = [torch.autograd, torch.nn.utils, torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.distributed]
spaces += [torch.amp.GradScaler, torch.nn.utils.parametrize, sys, os, threading, warnings, json.JSONEncoder]
spaces += [torch.nn.utils.clip_grad, torch.nn.utils.convert_parameters, prune.BasePruningMethod]
before = {(number, name): value for number, space in enumerate(spaces) for name, value in vars(space).items()}
environment = dict(os.environ)
import fsdp
changed = [str(key) for key, value in before.items() if vars(spaces[key[0]]).get(key[1]) is not value]
print(json.dumps(registered + changed + [key for key in os.environ if key not in environment]))
"""


def test_importing_the_package_registers_starts_and_replaces_nothing() -> None:
    found: Any = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == []


@pytest.mark.parametrize("is_on", [True, False])
def test_the_first_wrap_replaces_four_functions_or_none(ranks: RankPool, is_on: bool) -> None:
    (found,) = ranks(1, backend=None).run(_replaced_by_wrapping, is_on)  # a new process, in which no model was wrapped
    replaced = {each.name for each in torch_functions.REPLACED}
    assert len(replaced) <= 4
    modules = {"torch.nn.utils.clip_grad." + name.rpartition(".")[2] for name in replaced if ".utils." in name}
    changed = {name.replace("._get", ".get") for name in found}
    assert changed == (replaced | modules if is_on else set())


def _replaced_by_wrapping(is_on: bool) -> list[str]:
    """Wrap a model, and return the functions of torch that are others then."""
    if not is_on:
        os.environ[torch_functions.SWITCH] = "0"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    before = _functions()
    FullyShardedDataParallel(nn.Linear(2, 2))
    after = _functions()
    return [name for name, value in before.items() if any(x is not y for x, y in zip(value, after[name], strict=False))]


def _functions() -> dict[str, list[Any]]:
    """The functions of torch, each with the values that its closure contains."""
    spaces = {"torch.autograd": torch.autograd, "torch.nn.utils": nn.utils, "torch.nn.Module": nn.Module}
    spaces |= {"torch.optim.Optimizer": torch.optim.Optimizer, "torch.amp.GradScaler": torch.amp.GradScaler}
    spaces |= {"torch.nn.utils.clip_grad": clip_grad, "torch.nn.utils.convert_parameters": convert_parameters}
    spaces |= {"prune": prune.BasePruningMethod, "parametrize": nn.utils.parametrize, "torch.Tensor": Tensor}
    spaces |= {"weight_norm": sys.modules["torch.nn.utils.weight_norm"].WeightNorm, "sys": sys}
    found = {}
    for place, space in spaces.items():
        for name, value in vars(space).items():
            cells = getattr(value, "__closure__", None) or ()
            found[f"{place}.{name}"] = [value, *(cell.cell_contents for cell in cells)]
    return found
