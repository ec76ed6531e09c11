"""Folders of `torch.distributed.checkpoint` (DCP): loaded as FSDP2 has saved them, and by FSDP2 as we convert them."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp
from fsdp.checkpoint.formats.dcp import DcpFolder
from fsdp.checkpoint.formats.open_source import examine, format_of, open_source
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.json_values import decoded
from fsdp.optim_utils import full_optim_state_dict
from tests.helpers.checkpoint_models import flip
from tests.helpers.convert_formats import assert_same_states, converted, whole
from tests.helpers.damaged_files import Touch
from tests.helpers.dcp_folders import everything, save_sharded
from tests.helpers.equality import assert_same
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import counted_reads, shard_bytes


class Thin(nn.Module):
    """In 16 bits, in a unit of its own: FSDP2 wants one dtype in each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.weight.float().square().sum()


class Net(nn.Module):
    """Of what FSDP2 can shard: several dtypes, a buffer, fewer rows than ranks."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(5, 7))
        self.norm = nn.BatchNorm1d(7)
        self.second = wrap(nn.Linear(7, 2))
        self.thin = wrap(Thin())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.norm(self.first(inputs))).sum() + self.thin()


def net(wrap: Wrap = keep, seed: int = 0) -> Any:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(Net(wrap))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Weights and the rest in groups."""
    named = list(model.named_parameters())
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    groups = [{"params": weights, "lr": 0.02}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups)


ours = fully_sharded(use_orig_params=True)


def of_fsdp2(seed: int = 0) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = net(seed=seed)
    for module in (model.first, model.second, model.thin, model):
        fully_shard(module, mesh=mesh)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With the same batch on every rank."""
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(5))
    optimizer.zero_grad()
    model(inputs).backward()
    optimizer.step()


def plain(tree: Any) -> Any:
    """With whole tensors."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    return tree.detach().clone() if isinstance(tree, Tensor) else copy.deepcopy(tree)


def assert_same_optimizers(found: Any, expected: Any) -> None:
    """Full states by names: bits and settings."""
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert found["state"][name].keys() == state.keys()
        for key, value in state.items():
            assert_same(torch.as_tensor(found["state"][name][key]), torch.as_tensor(value), f"{name} {key}")
    for one, other in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert {**one, "params": set(one["params"])} == {**other, "params": set(other["params"])}


# From FSDP2 to us


@pytest.mark.parametrize(("savers", "loaders", "is_flat"), [(3, 2, False), (2, 3, True), (2, 1, False)])
def test_what_fsdp2_has_saved_is_loaded(
    ranks: RankPool, tmp_path: Path, savers: int, loaders: int, is_flat: bool
) -> None:
    expected = ranks(savers).run(_save_fsdp2, tmp_path / "saved", is_flat)[0]
    ranks(loaders).run(_load_into_ours, tmp_path / "saved", expected)


def _save_fsdp2(folder: Path, is_flat: bool) -> Any:
    model = of_fsdp2()
    optimizer = optimizer_of(model)
    for _ in range(2):
        step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model_state, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optimizer": state, "step": 2, "more": {"a": [1]}}, checkpoint_id=folder)
    state = get_state_dict(model, optimizer)[1]
    return plain(model_state), {"state": plain(state["state"]), "param_groups": state["param_groups"]}


def _load_into_ours(folder: Path, expected: tuple[Any, Any]) -> None:
    model = net(ours, seed=1)
    optimizer = optimizer_of(model)
    loaded = fsdp.load(folder, model, optimizer)
    assert loaded.values == {"step": 2, "more": {"a": [1]}}
    assert loaded.missing_keys == loaded.unexpected_keys == []
    assert_same_states(model.state_dict(), expected[0])
    assert_same_optimizers(full_optim_state_dict(model, optimizer, None), expected[1])


def test_flat_states_have_settings_of_parameters_and_fit_any_groups(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_fsdp2, tmp_path / "saved", True)
    ranks(2).run(_load_into_other_groups, tmp_path / "saved")


def _load_into_other_groups(folder: Path) -> None:
    model = net(ours, seed=1)
    named = list(model.named_parameters())
    weights = [param for name, param in named if name.endswith("weight")]
    others = [param for name, param in named if not name.endswith("weight")]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": weights[:1]}, {"params": weights[1:]}])
    fsdp.load(folder, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.02, 0.02]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 1e-2, 1e-2]


def test_a_rank_reads_only_what_it_keeps(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_fsdp2, tmp_path / "saved", False)
    ranks(3).run(_load_and_count, tmp_path / "saved")


def _load_and_count(folder: Path) -> None:
    model = net(ours, seed=1)
    with counted_reads() as sizes:
        fsdp.load(folder, model)
    assert sum(sizes) == shard_bytes(model) + sum(buffer.nbytes for buffer in model.buffers())


# From us to FSDP2


@pytest.mark.parametrize("is_flat", [False, True])
def test_what_we_have_saved_is_loaded_by_fsdp2(ranks: RankPool, tmp_path: Path, is_flat: bool) -> None:
    expected = ranks(2).run(_save_ours, tmp_path / "saved")[0]
    converted(tmp_path / "saved", tmp_path / "dcp", "--to", "dcp", *(["--flat-optimizer"] if is_flat else []))
    ranks(3).run(_load_into_fsdp2, tmp_path / "dcp", is_flat, expected)


def _save_ours(folder: Path) -> Any:
    model = net(ours)
    optimizer = optimizer_of(model)
    for _ in range(2):
        step(model, optimizer)
    fsdp.save(folder, model, optimizer, values={"step": 2})
    return plain(dict(model.state_dict())), full_optim_state_dict(model, optimizer, None)


def _load_into_fsdp2(folder: Path, is_flat: bool, expected: tuple[Any, Any]) -> None:
    model = of_fsdp2(seed=1)
    optimizer = optimizer_of(model)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    model_state, state = get_state_dict(model, optimizer, options=options)
    held = {"model": model_state, "optimizer": state, "step": 0}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"], options=options
    )
    model_state, state = get_state_dict(model, optimizer)
    assert held["step"] == 2
    assert_same_states(plain(model_state), expected[0])
    assert_same_optimizers({"state": plain(state["state"]), "param_groups": state["param_groups"]}, expected[1])


# Sharded state dicts of ours


@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_state_dict_is_loaded(ranks: RankPool, tmp_path: Path, world: int) -> None:
    ranks(3).run(_save_everything, tmp_path / "saved")
    ranks(world).run(_load_everything, tmp_path / "saved")


def _save_everything(folder: Path) -> None:
    save_sharded(everything(fully_sharded()), folder)


def _load_everything(folder: Path) -> None:
    model = everything(fully_sharded(), seed=1)
    fsdp.load(folder, model)
    assert_same_states(model.state_dict(), everything().state_dict())


# Chunks of every form


def test_chunks_along_any_dimension_are_put_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_cut, tmp_path / "saved")
    with closing(open_source(tmp_path / "saved")) as source:
        for name, value in cut_tensors().items():
            assert_same(whole(source.model, name), value, name)
            for start in range(value.numel()):
                part = torch.empty(min(5, value.numel() - start), dtype=torch.float64)
                source.model.read(name, part, start)
                assert torch.equal(part, value.reshape(-1)[start : start + 5].double()), (name, start)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads Linux's /proc")
def test_few_files_are_open_at_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_cut, tmp_path / "saved")
    with mock.patch("fsdp.checkpoint.formats.source._MOST_OPEN", 1), closing(open_source(tmp_path / "saved")) as source:
        before = len(os.listdir("/proc/self/fd"))
        for name, value in cut_tensors().items():  # each is in three files
            assert_same(whole(source.model, name), value, name)
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before


def cut_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (7, 3), "columns": (3, 7), "middle": (2, 5, 3), "last": (2, 2, 7)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _save_cut(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    dims = {"rows": 0, "columns": 1, "middle": 1, "last": 2}
    dcp.save(
        {name: distribute_tensor(value, mesh, [Shard(dims[name])]) for name, value in cut_tensors().items()},
        checkpoint_id=folder,
    )


# Where the model is


def saved_alone(folder: Path, state: Any, **options: Any) -> Path:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda state: state,
        lambda state: {"app": {"model": state, "epoch": 3}},
        lambda state: {**state, "epoch": 3},
    ],
    ids=["bare", "app", "beside values"],
)
def test_the_model_is_found_in_usual_places(tmp_path: Path, wrapped: Any) -> None:
    folder = saved_alone(tmp_path / "saved", wrapped(net().state_dict()))
    model = net(seed=1)
    fsdp.load(folder, model)
    assert_same_states(model.state_dict(), net().state_dict())


def test_names_that_a_planner_has_not_divided_are_divided_at_their_first_dot(tmp_path: Path) -> None:
    state = {f"model.{name}": value for name, value in net().state_dict().items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    model = net(seed=1)
    fsdp.load(saved_alone(tmp_path / "saved", state, planner=planner), model)
    assert_same_states(model.state_dict(), net().state_dict())


def test_a_model_elsewhere_is_named(tmp_path: Path) -> None:
    folder = saved_alone(tmp_path / "saved", {"teacher": {"x": net().state_dict()}, "student": {"y": torch.ones(2)}})
    with pytest.raises(ValueError, match=r"no model under a usual key \('teacher', 'student'\).*--model-key"):
        open_source(folder)
    with closing(open_source(folder, choices=Choices(model_key="teacher.x"))) as source:
        assert list(source.model.tensors) == list(net().state_dict())
        assert torch.equal(decoded(source.values)["student"]["y"], torch.ones(2))


# Damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_alone(tmp_path / "saved", {"model": net().state_dict(), "step": 3})


def test_missing_and_short_files_are_named_before_anything_is_changed(folder: Path) -> None:
    model, before = net(seed=1), net(seed=1).state_dict()
    file = folder / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{file} has \d+ bytes, and its contents end at \d+"):
        fsdp.load(folder, model)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file} is missing"):
        fsdp.load(folder, model)
    assert_same_states(model.state_dict(), before)


def test_parts_that_share_their_bytes_are_refused(folder: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, (folder / "__0_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="overlapping parts"):
        fsdp.load(folder, net())


def test_other_shapes_are_one_error(folder: Path) -> None:
    model = net()
    model.second = nn.Linear(7, 4)
    with pytest.raises(RuntimeError, match=r"second.weight in .* has shape \[2, 7\], but the model's \[4, 7\]"):
        fsdp.load(folder, model)


def test_an_optimizer_that_is_not_there_is_an_error(folder: Path) -> None:
    model = net()
    with pytest.raises(ValueError, match="contains no optimizer"):
        fsdp.load(folder, model, optimizer_of(model))


def test_what_one_rank_cannot_read_is_an_error_on_all(ranks: RankPool, folder: Path) -> None:
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    (place,) = (place for key, place in places.items() if key.fqn == "model.first.weight")
    flip(folder / "__0_0.distcp", place.offset)
    ranks(2).run(_load_damaged, folder)


def _load_damaged(folder: Path) -> None:
    model = net(ours, seed=1)
    with pytest.raises((ValueError, RuntimeError), match=r"model\.first\.weight in .* is not a file of torch\.save"):
        fsdp.load(folder, model)


def test_damaged_metadata_are_an_error(folder: Path) -> None:
    flip(folder / ".metadata", 1)
    with pytest.raises(ValueError, match=r"\.metadata is damaged, or has an unknown form"):
        fsdp.load(folder, net())


def test_nothing_in_the_metadata_is_executed(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(str(tmp_path / "made"))))
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        open_source(folder)
    assert not (tmp_path / "made").exists()


def test_every_flipped_byte_of_a_tensor_is_found(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    find = next(iter(DcpFolder(str(folder)).tree()["model"]["first.weight"].chunks.values()))
    flip(file, find().begin + 7)
    problems, _, _ = examine(format_of(str(folder)), str(folder), lambda _: lambda nbytes: None)
    assert len(problems) == 1
    assert "model.first.weight" in problems[0]
