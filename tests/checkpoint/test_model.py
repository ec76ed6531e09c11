"""`fsdp.save` and `fsdp.load` of models: any number of ranks writes what any other reads, and everybody else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.checkpoint_models import counted_writes, save_in, stored_state, tied_state
from tests.helpers.dcp_folders import everything
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import FORMS, sharded
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.offload import with_folder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import train
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, adam, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import counted_reads, shard_bytes

OPTIONS = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"offload": "cpu"},
    {"offload": "disk"},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)},
]
WORLDS = [1, 2, 3, 4]


# Values


@parametrize_cases(saved_by=WORLDS, loaded_by=WORLDS, options=OPTIONS)
def test_any_number_of_ranks_loads_what_any_other_has_saved(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(case.saved_by).run(save_in, tmp_path / "run", everything, fully_sharded())
    ranks(case.loaded_by).run(_load, tmp_path / "run", with_folder(case.options, tmp_path / "offload"))


def _load(folder: Path, options: dict[str, Any]) -> None:
    model = everything(fully_sharded(**options))
    loaded = fsdp.load(folder, model)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), everything(seed=1).state_dict())


@parametrize_pairs(saved_by=[3, 1, 2, 4], options=OPTIONS)
def test_the_file_is_the_plain_models_state(
    ranks: RankPool, tmp_path: Path, saved_by: int, options: dict[str, Any]
) -> None:
    wrap = fully_sharded(**with_folder(options, tmp_path / "offload"))
    ranks(saved_by).run(save_in, tmp_path / "run", everything, wrap)
    expected = tied_state(everything, seed=1)
    found = stored_state(tmp_path / "run")
    assert found.keys() == expected.keys()
    assert_same_state({name: found[name] for name in expected}, expected)
    plain = everything(seed=2)
    fsdp.load(tmp_path / "run", plain)
    assert_same_state(plain.state_dict(), everything(seed=1).state_dict())


def test_replicas_write_once(ranks: RankPool, tmp_path: Path) -> None:
    written = ranks(4).run(_save_hybrid, tmp_path)
    assert sum(written) == sum(value.nbytes for value in tied_state(everything, seed=1).values())
    expected = tied_state(everything, seed=1)
    found = stored_state(tmp_path / "run")
    assert_same_state({name: found[name] for name in expected}, expected)
    ranks(4).run(_load_hybrid, tmp_path)


def _hybrid() -> Wrap:
    from torch.distributed.device_mesh import init_device_mesh

    return fully_sharded(process_group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _save_hybrid(folder: Path) -> int:
    model = everything(_hybrid(), seed=1)
    with counted_writes() as sizes:
        fsdp.save(folder / "run", model)
    return sum(sizes)


def _load_hybrid(folder: Path) -> None:
    model = everything(_hybrid())
    fsdp.load(folder / "run", model)
    assert_same_state(model.state_dict(), everything(seed=1).state_dict())


def test_a_plain_model_that_all_ranks_have_is_written_once(ranks: RankPool, tmp_path: Path) -> None:
    written = ranks(3).run(_save_plain, tmp_path)
    assert sum(written) == sum(value.nbytes for value in tied_state(everything, seed=1).values())
    assert written[1:] == [0, 0]


def _save_plain(folder: Path) -> int:
    with counted_writes() as sizes:
        fsdp.save(folder / "run", everything(seed=1))
    return sum(sizes)


def test_a_plain_model_needs_no_process_group(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", everything(seed=1))
    model = FullyShardedDataParallel(everything(), Alone())
    fsdp.load(tmp_path / "run", model)
    assert_same_state(model.state_dict(), everything(seed=1).state_dict())


@pytest.mark.parametrize("stride", [4, 2])
def test_buffers_with_strides_are_saved_and_loaded(tmp_path: Path, stride: int) -> None:
    model, other = nn.Module(), nn.Module()
    model.register_buffer("some", torch.arange(4.0)[::stride])  # one element, and two
    other.register_buffer("some", torch.zeros(4)[::stride])
    fsdp.save(tmp_path / "run", model)
    fsdp.load(tmp_path / "run", other)
    assert torch.equal(other.some, model.some)


@pytest.mark.parametrize("lazily", [torch.conj, lambda some: some.conj().imag, lambda some: some[0].conj().imag])
def test_buffers_may_be_lazy_conjugates(tmp_path: Path, lazily: Any) -> None:
    model, other, plain = nn.Module(), nn.Module(), nn.Module()
    model.register_buffer("some", lazily(torch.tensor([1 + 2j, 3 - 4j])))
    other.register_buffer("some", lazily(torch.zeros(2, dtype=torch.complex64)))
    plain.register_buffer("some", torch.zeros_like(model.some).resolve_conj().resolve_neg())
    fsdp.save(tmp_path / "run", model)
    for one in (other, plain):
        fsdp.load(tmp_path / "run", one)
        assert torch.equal(one.some, model.some)


def test_an_expanded_buffer_is_an_error_before_anything_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    fsdp.save(tmp_path / "run", model)
    before = model.weight.detach().zero_().clone()
    with pytest.raises(RuntimeError, match="nothing was loaded:\n\tmask is expanded"):
        fsdp.load(tmp_path / "run", model)
    with pytest.raises(RuntimeError, match="nothing was loaded:\n\tmask is expanded"):
        fsdp.load_safetensors(model, tmp_path / "run")
    assert torch.equal(model.weight, before)


def test_batch_norms_that_each_rank_trains_for_itself_are_those_of_the_first(ranks: RankPool, tmp_path: Path) -> None:
    weights = ranks(2).run(_save_own_norms, tmp_path)
    assert torch.equal(stored_state(tmp_path / "run")["1.weight"], weights[0])
    assert not torch.equal(weights[0], weights[1])


def _save_own_norms(folder: Path) -> Tensor:
    model = fsdp.auto_wrap_bn(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), single_rank_pg=True)
    model = FullyShardedDataParallel(model)
    own = torch.full((4,), float(torch.distributed.get_rank()))
    for param in model.module[1].parameters():
        with torch.no_grad():
            param.fill_(float(own[0]) + 1)
    fsdp.save(folder / "run", model)
    return own + 1


# Other dtypes


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_cast_on_their_way_and_buffers_are_not(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    casts = ranks(world_size).run(_save_cast, tmp_path)
    assert all(cast == casts[0] for cast in casts)
    plain = everything(seed=1)
    params = dict(plain.named_parameters())
    assert casts[0] == {name: value.dtype for name, value in params.items() if value.dtype != torch.bfloat16}
    found = stored_state(tmp_path / "run")
    for name, value in tied_state(everything, seed=1).items():
        assert torch.equal(found[name], value.bfloat16() if name in params else value), name


def _save_cast(folder: Path) -> dict[str, torch.dtype]:
    return fsdp.save(folder / "run", everything(fully_sharded(), seed=1), dtype=torch.bfloat16).cast


# What is no tensor


VALUES = {
    "step": 7,
    "rate": 0.1,
    "name": "run",
    "lists": [1, [2.5, None]],
    "betas": (0.9, (1, 2)),
    "by_number": {3: "three", (1, 2): "pair"},
    "raw": b"\x00\xff",
    "infinite": float("inf"),
    "flags": {"~odd": True},
}


def test_values_come_back_as_they_were(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_values, tmp_path)
    loaded = fsdp.load(tmp_path / "run", nested_mlp())
    tensor = loaded.values.pop("tensor")
    assert loaded.values == VALUES
    assert type(loaded.values["betas"]) is tuple
    assert torch.equal(tensor, torch.arange(6, dtype=torch.int16).view(2, 3))
    assert loaded.world_size == 2


def _save_values(folder: Path) -> None:
    values = VALUES | {"tensor": torch.arange(6, dtype=torch.int16).view(2, 3)}
    mine = values if torch.distributed.get_rank() == 0 else None
    fsdp.save(folder / "run", nested_mlp(fully_sharded()), values=mine)


def test_values_may_be_lazy_conjugates(tmp_path: Path) -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    fsdp.save(tmp_path / "run", nested_mlp(), values=[conjugate, conjugate.imag])
    first, second = fsdp.checkpoint.values(tmp_path / "run")
    assert first.tolist() == [1 - 2j, 3 + 4j]
    assert second.tolist() == [-2, 4]


def test_numbers_of_numpy_come_back_as_pythons(tmp_path: Path) -> None:
    model = nested_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float32(0.5))  # type: ignore[arg-type]
    fsdp.save(
        tmp_path / "run", model, optimizer, values=[np.int64(3), np.float32(0.5), np.bool_(True), np.float64("inf")]
    )
    loaded = fsdp.load(tmp_path / "run", model, optimizer).values
    assert list(map(type, loaded)) == [int, float, bool, float]
    assert loaded == [3, 0.5, True, float("inf")]
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_scheduler_of_schedulers_goes_on_from_saved_values(tmp_path: Path) -> None:
    model = nested_mlp()

    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        # At its first step, torch calls a method of the Counter in its state.
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, steps], [4])

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = []
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = made()
    optimizer.step()
    scheduler.step()
    fsdp.save(tmp_path / "run", model, optimizer, values=scheduler.state_dict())
    resumed, loaded = made()
    loaded.load_state_dict(fsdp.load(tmp_path / "run", model, resumed).values)
    assert rates(resumed, loaded) == rates(optimizer, scheduler)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": [1, object()]}, r"values\['a'\]\[1\] is a builtins.object"),
        ({"big": torch.zeros(1 << 19)}, r"values\['big'\] is a tensor of 2097152 bytes"),
    ],
)
def test_other_values_are_refused_and_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fsdp.save(tmp_path / "run", nested_mlp(), values=values)
    assert not list(tmp_path.iterdir())


class Counting(nn.Linear):
    """Counts its calls in extra state."""

    def __init__(self, count: Any = 0) -> None:
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


@on_ranks(2)
def test_extra_state_of_modules_is_saved_and_loaded(tmp_path: Path) -> None:
    inner = Counting(5)
    fsdp.save(
        tmp_path / "run", FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(inner), nn.Linear(2, 2)))
    )
    other = Counting()
    model = FullyShardedDataParallel(nn.Sequential(other, nn.Linear(2, 2)))
    fsdp.load(tmp_path / "run", model)
    assert other.count == 5
    plain = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"unexpected: 0\._extra_state"):
        fsdp.load(tmp_path / "run", plain)
    assert fsdp.load(tmp_path / "run", plain, strict=False).missing_keys == []
    with pytest.raises(TypeError, match=r"0\._extra_state\['count'\] is a builtins.object"):
        fsdp.save(tmp_path / "run", FullyShardedDataParallel(nn.Sequential(Counting(object()))))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "is_sharded"), [(2, 2, True), (2, 3, True), (2, 2, False), (1, 2, False)]
)
def test_generators_go_on_where_as_many_ranks_load(
    ranks: RankPool, tmp_path: Path, saved_by: int, loaded_by: int, is_sharded: bool
) -> None:
    drawn = ranks(saved_by).run(_save_and_draw, tmp_path, is_sharded)
    found = ranks(loaded_by).run(_load_and_draw, tmp_path, is_sharded)
    goes_on = loaded_by == saved_by
    assert len(set(drawn)) == saved_by
    assert (found[:2] == [(True, each) for each in drawn]) is goes_on
    assert [flag for flag, _ in found] == [goes_on] * loaded_by


def _draw() -> tuple[float, ...]:
    import random

    import numpy as np

    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _save_and_draw(folder: Path, is_sharded: bool) -> tuple[float, ...]:
    model = nested_mlp(fully_sharded() if is_sharded else keep)
    for _ in range(torch.distributed.get_rank() + 1):
        _draw()
    fsdp.save(folder / "run", model)
    return _draw()


def _load_and_draw(folder: Path, is_sharded: bool) -> tuple[bool, tuple[float, ...]]:
    loaded = fsdp.load(folder / "run", nested_mlp(fully_sharded() if is_sharded else keep))
    return loaded.has_generators, _draw()


def test_the_header_is_what_transformers_asks_for(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp())
    text = (tmp_path / "run" / "model.safetensors").read_bytes()
    length = int.from_bytes(text[:8], "little")
    assert length % 8 == 0
    header = json.loads(text[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt"}
    assert load_file(tmp_path / "run" / "model.safetensors").keys() == keep(nested_mlp()).state_dict().keys()


# What it costs


@parametrize_pairs(at_most=5, world_size=WORLDS, options=OPTIONS[:5])
def test_pain_point_27_every_byte_is_written_and_read_once(
    ranks: RankPool, tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    counts = ranks(world_size).run(_count, tmp_path, with_folder(options, tmp_path / "offload"))
    total = sum(value.nbytes for value in nested_mlp().state_dict().values())
    assert sum(written for written, _, _ in counts) == sum(read for _, read, _ in counts) == 3 * total  # two moments
    assert all(written == read == 3 * kept for written, read, kept in counts)
    assert (tmp_path / "run" / "model.safetensors").stat().st_size - total < 2048


def _count(folder: Path, options: dict[str, Any]) -> tuple[int, int, int]:
    model = nested_mlp(fully_sharded(**options))
    optimizer = adam(model.parameters())
    train(model, optimizer, range(1))
    with counted_writes() as written:
        fsdp.save(folder / "run", model, optimizer)
    with counted_reads() as read:
        fsdp.load(folder / "run", model, optimizer)
    return sum(written), sum(read), shard_bytes(model)


@parametrize_pairs(dtype=[None, torch.bfloat16], world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_1_saving_and_loading_take_no_memory(tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = FullyShardedDataParallel(nn.Linear(2048, 4096, bias=False))
    with torch.profiler.profile(profile_memory=True) as profile:
        fsdp.save(tmp_path / "run", model, dtype=dtype)
        fsdp.load(tmp_path / "run", model)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) <= 4 << 20  # a block, for casts


@on_ranks(1)
def test_a_tensor_dimension_of_one_rank_is_saved_as_if_there_were_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))

    def wrapped(value: float) -> Any:
        weight = distribute_tensor(torch.full((4, 2), value), mesh["tp"], [Shard(0)])
        return FullyShardedDataParallel(nn.ParameterList([nn.Parameter(weight)]), mesh["dp"])

    fsdp.save(path, wrapped(2.0))
    loaded = wrapped(3.0)
    fsdp.load(path, loaded)
    for found in (load_file(path / "model.safetensors")["0"], loaded.state_dict()["0"]):
        assert torch.equal(found, torch.full((4, 2), 2.0))


class Strided(nn.Linear):
    """Has a parameter and a buffer of one element, which are contiguous with a stride of 2."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 1)
        nn.init.constant_(self.weight, value)
        self.bias = nn.Parameter(self.weight.detach()[:, 0].clone())
        self.register_buffer("scale", self.bias.detach().clone())
        assert (self.bias.stride(), self.scale.stride()) == ((2,), (2,))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_single_element_may_have_any_stride(tmp_path: Path, form: str) -> None:
    values = {"tensor": torch.ones(1, 2)[:, 0]}
    model, loaded, received = sharded(Strided(2.0), form), sharded(Strided(3.0), form), dict[str, Tensor]()
    model(torch.ones(1, 2)).sum().backward()
    fsdp.save(tmp_path / "run", model, values=values)
    assert fsdp.load(tmp_path / "run", loaded).values["tensor"].tolist() == [1.0]
    is_first = dist.get_rank() == 0

    def take(tensors: dict[str, Tensor]) -> None:
        received.update({name: one.clone() for name, one in tensors.items()})

    fsdp.stream_weights(loaded, take if is_first else None, bucket_bytes=1 << 20, buffers=True)
    expected = {"weight": [2.0], "bias": [2.0], "scale": [2.0]}
    assert {name: value.unique().tolist() for name, value in received.items()} == (expected if is_first else {})
