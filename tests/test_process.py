"""Effects of importing and wrapping on the rest of the process: functions of others, hooks, threads, sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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
