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
from fsdp.distributed.switches import TORCH_FUNCTIONS
from fsdp.layers import torch_functions
from tests.helpers.ranks import RankPool
from tests.layers.state_dict.test_tensor_part import part_of
from tests.test_public_names import MODULES

# Imports the package in a process in which all that others register has been registered, and prints what it has done.
# The arguments are a file with a part of a tensor, and names of modules.
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
effects = registered + changed + [key for key in os.environ if key not in environment]
loaded = [name for name in sys.modules if name.split(".")[0] == "fsdp"]
part = type(torch.load(sys.argv[1])).__name__
asked = [getattr(fsdp, name).__doc__ for name in sys.argv[2:]] + [fsdp.wrap(1), fsdp.__version__]
import fsdp.compat.fairscale as compat
finds = compat._FINDER in sys.meta_path
print(json.dumps({"effects": effects, "loaded": loaded, "part": part, "asked": asked, "finds": finds}))
"""
# Trains on a mesh of two dimensions until the interpreter ends, with torch's caches of specifications in use.
ENDING = """
import torch, fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = fsdp.fully_shard(parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""
# Modules that `import fsdp` loads: the engine, the ways between ranks that it uses, the front doors and `wrap`.
LOADED_AT_ONCE = {
    "": "fsdp",
    "fsdp.": "distributed engine fully_shard fully_sharded_data_parallel layers wrap",
    "fsdp.distributed.": "collectives communicator consensus devices dtensor gather_extension messages passes",
    "fsdp.engine.": "assigned_attributes autograd call_stack counted_data flat_param forward_hooks grad_buffer "
    "gradient_hooks handle ignored layout names observers orig_params originals phase "
    "placeholder placements policy precision presentation reduction rows_layout runtime schedule "
    "shard shard_values trees unit unit_backward unsharded_params usage user_attributes",
    "fsdp.layers.": "flatten_params_wrapper foreign_names lazy managed_params module_overrides on_demand options "
    "shard_module sharding_strategy shared_params state_requests wrapper",
}
MAX_LOADED = 60


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Facts about a process that has imported the package."""
    path = tmp_path_factory.mktemp("parts") / "part.pt"
    torch.save(part_of(), path)
    command = [sys.executable, "-c", IMPORTING, str(path), *MODULES]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_importing_the_package_registers_starts_and_replaces_nothing(imported: Any) -> None:
    assert imported["effects"] == []


def test_importing_the_package_loads_the_engine_and_the_front_doors(imported: Any) -> None:
    allowed = {f"{package}{name}" for package, names in LOADED_AT_ONCE.items() for name in names.split()}
    assert set(imported["loaded"]) == allowed
    assert len(allowed) <= MAX_LOADED


def test_a_process_with_tensor_parallelism_ends_without_messages() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in ended.stderr


def test_importing_the_package_is_enough_to_load_a_part_of_a_tensor(imported: Any) -> None:
    assert imported["part"] == "TensorPart"


def test_importing_the_package_is_enough_for_its_modules(imported: Any) -> None:
    assert len(imported["asked"]) == len(MODULES) + 2
    assert all(imported["asked"])


def test_importing_fairscales_names_installs_nothing(imported: Any) -> None:
    assert imported["finds"] is False


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
        os.environ[TORCH_FUNCTIONS] = "0"
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    before = _functions()
    FullyShardedDataParallel(nn.Linear(2, 2))
    after = _functions()
    return [name for name, value in before.items() if any(x is not y for x, y in zip(value, after[name], strict=False))]


@pytest.mark.parametrize("switch", ["FSDP_TORCH_FUNCTIONS", "FSDP_WATCHDOG", "FSDP_SHARED_MEMORY"])
def test_a_switch_with_another_value_is_an_error(ranks: RankPool, switch: str) -> None:
    ranks(1, backend=None).run(_wrap_with, switch)


def _wrap_with(switch: str) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    module = nn.Linear(2, 2)
    os.environ[switch] = "off"
    with pytest.raises(ValueError, match=f"{switch}=off in the environment: set it to 0"):
        FullyShardedDataParallel(module)
    os.environ[switch] = "1"
    assert FullyShardedDataParallel(module)(torch.ones(1, 2)).shape == (1, 2)  # nothing was changed before


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
