"""The tables of the migration pages name what the installed torch has, and what is here; their programs run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn
from torch.distributed.fsdp import _flat_param

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.layers.foreign_names import ATTRIBUTES, KEYWORDS, VARIABLES
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"


def section(page: str, heading: str) -> str:
    """Return what a page has below a heading of any level, up to the next section of the page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.split(rf"\n##+ {heading}\n", text, maxsplit=1)[1].split("\n## ")[0]


def table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading."""
    below = section(page, heading).split("\n##")[0]
    rows = [line.strip("|").split("|") for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_every_argument_of_fsdp1_is_in_its_table() -> None:
    rows = table("migration.md", "Arguments")
    assert [names(row[0]) for row in rows] == [[name] for name in parameters(torchs.FullyShardedDataParallel.__init__)]


def test_arguments_are_said_to_be_here_if_they_are() -> None:
    ours = parameters(FullyShardedDataParallel.__init__)
    for argument, here, _ in table("migration.md", "Arguments"):
        (name,) = names(argument)
        assert set(names(here)) <= {*ours}, name
        assert (name in names(here)) == (name not in KEYWORDS), name


def test_every_argument_of_ddp_is_in_its_table() -> None:
    first = {name for row in table("migration.md", "Arguments and methods") for name in names(row[0])}
    assert set(parameters(nn.parallel.DistributedDataParallel.__init__)) <= first


def test_every_method_of_fsdp1_is_in_its_table() -> None:
    public = {name for name in vars(torchs.FullyShardedDataParallel) if not name.startswith("_")}
    assert {name for row in table("migration.md", "Methods") for name in names(row[0])} == public


def test_methods_are_said_to_be_here_if_they_are() -> None:
    for theirs, here, _ in table("migration.md", "Methods"):
        assert all(hasattr(FullyShardedDataParallel, name) for name in names(here)), theirs
        for function, arguments in re.findall(r"`fsdp\.([\w.]+)(?:\(([^)]*)\))?`", here):
            signature = parameters(_found(function))
            assert not arguments or len(arguments.split(", ")) <= len(signature), here


def test_every_state_dict_type_of_fsdp1_is_in_its_table() -> None:
    first = " ".join(row[0] for row in table("migration.md", "State dicts"))
    assert all(f"`{kind.name}`" in first for kind in torchs.StateDictType)


def test_policies_of_torch_have_counterparts() -> None:
    for theirs, ours in table("migration.md", "Policies"):
        assert all(hasattr(torchs.wrap, name) for name in re.findall(r"`(\w+)[`(]", theirs))
        assert all(hasattr(fsdp, name) for name in re.findall(r"`(\w+)[`(]", ours) if name != "wrapper_config")


def test_every_name_of_the_flat_parameter_of_fsdp1_is_in_its_table() -> None:
    first = " ".join(row[0] for row in table("migration.md", "Flat parameters and handles"))
    assert set(_flat_param.__all__) <= set(re.findall(r"\w+", first))
    source = inspect.getsource(_flat_param)
    assert all(re.search(rf"\b{name}\b", source) for name in re.findall(r"`(_?\w+)[`(]", first))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_counterparts_of_the_flat_parameter_of_fsdp1_exist(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 3), Alone(), use_orig_params=use_orig_params)
    (handle,) = fsdp.flat_param_handles(model)
    roots = {"handle": handle, "flat": handle.flat_param, "layout": handle.layout, "model": model, "fsdp": fsdp}
    for theirs, here, _ in table("migration.md", "Flat parameters and handles"):
        for root, path in re.findall(r"\b(handle|flat|layout|model|fsdp)\.([\w.]+)", here):
            found: Any = roots[root]
            for part in path.split("."):
                assert hasattr(found, part), theirs
                found = getattr(found, part)
        for method in re.findall(r"`(\w+)\(\)`", here):
            assert hasattr(handle, method) or hasattr(handle.flat_param, method), theirs


def test_attributes_of_fsdp1_in_its_table_are_here_or_errors() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 3), Alone())
    rows = table("migration.md", "Attributes")
    assert all(name in ATTRIBUTES or hasattr(model, name) for row in rows for name in names(row[0]))


def test_the_environment_variables_of_fsdp1_are_in_their_table() -> None:
    rows = table("migration.md", "Environment variables")
    assert {name for row in rows for name in names(row[0])} == set(VARIABLES)


def test_methods_of_fsdp2_in_the_table_are_torchs() -> None:
    text = section("migration.md", "From FSDP2")
    methods = set(re.findall(r"`(set_\w+)\(", text)) - {"set_gradient_divide_factors"}
    assert methods
    assert all(hasattr(torchs.FSDPModule, name) for name in methods)
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) < {*parameters(torchs.fully_shard)}


def _found(path: str) -> Any:
    found: Any = fsdp
    for part in path.split("."):
        found = getattr(found, part)
    return found


# The programs


class Block(nn.Linear):
    pass


def programs(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@on_ranks(2)
def test_what_fsdp1_becomes_trains_alike() -> None:
    losses = []
    for program in programs(section("migration.md", "From FSDP1")):
        torch.manual_seed(0)
        known = {"torch": torch, "Block": Block, "device": torch.device("cpu")}
        known["model"] = nn.Sequential(Block(4, 6), nn.ReLU(), Block(6, 3))
        exec(program, known)
        model: Any = known["model"]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.linspace(-1, 1, 8).view(2, 4)
        for _ in range(2):
            loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == 3  # the last one's class is a subclass
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-2)  # sums of 16 bits in another order, and of 32


@on_ranks(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_methods_of_torchs_class_do_not_know_the_models() -> None:
    theirs, local = torchs.FullyShardedDataParallel, torchs.StateDictType.LOCAL_STATE_DICT
    model: Any = fsdp.shard(nn.Sequential(Block(4, 6), Block(6, 3)), units={Block}, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = {name: value.shape for name, value in model.state_dict().items()}
    theirs.set_state_dict_type(model, local)
    assert {name: value.shape for name, value in model.state_dict().items()} == expected
    assert theirs.fsdp_modules(model) == []
    with theirs.summon_full_params(model):
        assert all(param.dim() == 1 for param in model.parameters())
    with pytest.raises(KeyError, match="None"), theirs.state_dict_type(model, local):
        pass
    with pytest.raises(AttributeError, match="optim_state_dict_config"):
        theirs.optim_state_dict(model, optimizer)
    with pytest.raises(IndexError):
        theirs.full_optim_state_dict(model, optimizer)


@on_ranks(2)
def test_what_deepspeeds_engine_becomes_trains(tmp_path: Path) -> None:
    program = programs(section("migration.md", "From DeepSpeed"))[1]
    known = {name: getattr(fsdp, name) for name in fsdp.__all__}
    known |= {"fsdp": fsdp, "torch": torch, "Block": Block, "model": nn.Sequential(Block(4, 6), Block(6, 3))}
    known |= {"batches": [(torch.ones(2, 4), torch.ones(2, 3))] * 2, "loss_of": _loss_of}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(fsdp, "init_distributed", lambda: torch.device("cpu"))
        torch.manual_seed(0)
        exec(program, known)
    assert not fsdp.load(tmp_path / "runs" / "model", known["model"], known["optimizer"]).missing_keys


def _loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()
