"""Frozen parameters of any class and dtype, as quantised bases have, are sharded as bytes beside trained ones."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fsdp
from fsdp import EMA, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from tests.helpers.forms import WRAPPERS as FORMS
from tests.helpers.hybrid import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.quantised import Adapted, Rows8, plain_values, quantised
from tests.helpers.traffic import gathering

KINDS = ["two tensors", "nested", "plain dtypes", "torchao"]


def sharded(model: nn.Sequential, form: str, **options: Any) -> Any:
    """Shard each layer and the rest."""
    if form == "rows":
        for layer in (model[0], model[2]):
            fully_shard(layer, **options)
        return fully_shard(model, **options)
    for number in (0, 2):
        model[number] = FullyShardedDataParallel(model[number], **FORMS[form], **options)
    return FullyShardedDataParallel(model, **FORMS[form], **options)


def save_by_first(state: dict[str, Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        save_file(state, path)
    dist.barrier()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int) -> Tensor:
    return torch.randn(5, 33, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: range = range(3), **cast: Any) -> list[Tensor]:
    """Train adapters and biases on the same batches on every rank; return the losses."""
    optimizer, losses = torch.optim.SGD(trained(model), lr=0.1), []
    for step in steps:
        loss = model(batch(step).to(**cast) if cast else batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_state(state: dict[str, Any], plain: nn.Module) -> None:
    expected = plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert type(state[name]) is type(value), name
        assert state[name].dtype == value.dtype, name
        exact = "base" in name or not value.is_floating_point()
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(plain_values(state[name]), plain_values(value), **tolerance, msg=name)


@parametrize_pairs(kind=KINDS, form=[*FORMS, "rows"], world_size=[2, 3, 1], reshards=[True, False])
@on_ranks("world_size")
def test_a_quantised_base_trains_as_the_unsharded_one(kind: str, form: str, reshards: bool) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    plain, model = quantised(kind), sharded(quantised(kind), form, reshard_after_forward=reshards)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
        if form != "rows":
            assert_same_state(model.state_dict(), plain)


@parametrize_pairs(kind=KINDS[:2], form=["flat", "orig", "rows"])
@on_ranks(2)
def test_the_bytes_of_a_unit_are_gathered_together(kind: str, form: str) -> None:
    model = sharded(quantised(kind), form)
    with mock.patch("fsdp.engine.runtime.SMALL_BYTES", 0):  # or several units come together
        train(model, range(1))
    handles = [one for one in fsdp.flat_param_handles(model) if one.flat_param.dtype is torch.uint8]
    with gathering() as started, torch.no_grad():
        model(batch(0))
    of_bytes = [what for what in started if any(f" {handle.name} " in what for handle in handles)]
    assert len(of_bytes) == len(handles) == 2


class InBuffers(nn.Module):
    """A layer with its weight in buffers, as those of GPTQ and AWQ, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.linspace(-1, 1, 64).view(8, 8)
        self.register_buffer("qweight", (weight * 127).to(torch.int8))
        self.register_buffer("scales", torch.full((8, 1), 1 / 127))
        self.adapter = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ (self.qweight * self.scales) + self.adapter(inputs)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_weights_in_buffers_are_sharded_as_frozen_parameters_of_their_names(form: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(InBuffers(), nn.Tanh(), nn.Linear(8, 2))
    model: Any = copy.deepcopy(plain)
    for name, value in list(model[0].named_buffers(recurse=False)):
        delattr(model[0], name)
        model[0].register_parameter(name, nn.Parameter(value, requires_grad=False))
    model = sharded(model, form)
    inputs = torch.linspace(-2, 2, 24).view(3, 8)
    for each in (plain, model):
        each(inputs).square().sum().backward()
    assert torch.equal(model(inputs), plain(inputs))
    shards = [one.flat_param for one in fsdp.flat_param_handles(model) if not one.flat_param.is_floating_point()]
    assert [one.nbytes for one in shards] == [32]
    assert model.state_dict().keys() == plain.state_dict().keys()


@on_ranks(3)
def test_each_rank_holds_its_share_of_the_bytes() -> None:
    model = sharded(quantised("two tensors"), "orig")
    bases = [one.flat_param for one in fsdp.flat_param_handles(model) if one.flat_param.dtype is torch.uint8]
    # Values of 8 bits and a float32 scale for each row, each padded to 16 bytes, and all of them to equal shards of
    # multiples of 16.
    sizes = [(576, 80), (160, 48)]
    assert [one.numel() for one in bases] == [-(-sum(each) // (3 * 16)) * 16 for each in sizes]
    whole = FullyShardedDataParallel(quantised("two tensors"), use_orig_params=True)
    plan = fsdp.plan(quantised("two tensors"), world_size=3, use_orig_params=True)
    assert plan.units[0].shard_bytes == sum(one.flat_param.nbytes for one in fsdp.flat_param_handles(whole))


@parametrize_pairs(at_most=4, kind=KINDS, form=[*FORMS, "rows"])
@on_ranks(3)
def test_a_checkpoint_of_bytes_loads_at_another_world_size(tmp_path: Path, kind: str, form: str) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    plain, model = quantised(kind), sharded(quantised(kind), form)
    with torch.compiler.set_stance("force_eager"):
        train(plain, range(2))
        train(model, range(2))
        fsdp.save(tmp_path / "saved", model)
        group = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return
        again = quantised(kind)
        with torch.no_grad():
            for param in again.parameters():
                if type(param) in (Tensor, nn.Parameter):
                    param.zero_()
        target = sharded(again, "flat", process_group=group)
        fsdp.load(tmp_path / "saved", target)
        assert_same_state(target.state_dict(), plain)
        found, expected = (train(each, range(2, 3)) for each in (target, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@on_ranks(2)
def test_files_with_other_values_than_bytes_are_an_error(tmp_path: Path, dtype: torch.dtype) -> None:
    def layer(dtype: torch.dtype) -> nn.Module:
        made = nn.Linear(3, 3)
        made.table = nn.Parameter(torch.ones(16).to(dtype), requires_grad=False)  # as many elements as bytes below
        return made

    fsdp.save(tmp_path / "saved", fully_shard(layer(dtype)))
    model = FullyShardedDataParallel(layer(torch.int8))
    with pytest.raises(
        RuntimeError, match=rf"table .*\[16\] of {dtype}.*\[16\] of torch.int8, is \[16\] int8.*same way"
    ):
        fsdp.load(tmp_path / "saved", model)
    with pytest.raises(
        RuntimeError, match=r"table is sharded as 16 bytes.*load a tensor of its own class with load_state_dict"
    ):
        model.load_sharded_state_dict(model.state_dict() | {"table": torch.ones(16, dtype=dtype)})
    assert model.state_dict()["table"].eq(1).all()


class Renamed(Rows8):
    """A class with the same inner tensors."""


def of_class(kind: type[Rows8], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers whose quantised weights are of another class, or compute in another dtype."""
    model = quantised("two tensors")
    for layer in (model[0], model[2]):
        weight = layer.base.weight
        layer.base.weight = nn.Parameter(kind(weight.values, weight.scale, dtype), requires_grad=False)
    return model


@parametrize_pairs(form=[*FORMS, "rows"], other=[(Renamed, torch.float32), (Rows8, torch.bfloat16)], at_most=4)
@on_ranks(2)
def test_files_of_another_class_or_other_metadata_are_an_error(tmp_path: Path, form: str, other: Any) -> None:
    fsdp.save(tmp_path / "saved", sharded(quantised("two tensors"), form))
    kind = other[0].__name__
    model = sharded(of_class(*other), form)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.zero_()
    message = (
        rf"0\.base\.weight in .* is Rows8 \[17, 33\].*torch\.float32.*the model's is {kind} \[17, 33\].*same class"
    )
    for load in (fsdp.load, lambda path, model: fsdp.load_safetensors(model, path / "model.safetensors")):
        with pytest.raises(RuntimeError, match=message):
            load(tmp_path / "saved", model)
    assert all(not param.any() for param in model.parameters() if param.requires_grad)


def _held(model: nn.Sequential, form: str) -> Any:
    """Return a model as it is, sharded, or sharded except its quantised weights."""
    if form == "plain":
        return model
    bases = [param for param in model.parameters() if type(param) not in (Tensor, nn.Parameter)]
    if form == "ignored rows":
        return fully_shard(model, ignored_params=set(bases))
    if form == "ignored":
        return FullyShardedDataParallel(model, use_orig_params=True, ignored_parameters=bases)
    return sharded(model, form)


@parametrize_pairs(
    kind=["two tensors", "nested", "torchao"],
    source=["plain", "ignored", "ignored rows", "flat", "rows"],
    target=["plain", "ignored", "ignored rows", "orig", "rows"],
)
@on_ranks(2)
def test_a_checkpoint_of_quantised_weights_is_of_the_plain_model(
    tmp_path: Path, kind: str, source: str, target: str
) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    plain, model, again = quantised(kind), _held(quantised(kind), source), quantised(kind)
    fsdp.save(tmp_path / "saved", model)
    with torch.no_grad():
        for param in again.parameters():
            inner = [param] if param.requires_grad else [getattr(param, name) for name in _plain_inner(param)]
            for each in inner:
                each.zero_()
    weight = again[0].base.weight
    loaded = _held(again, target)
    fsdp.load(tmp_path / "saved", loaded)
    if target == "plain":
        assert again[0].base.weight is weight
        assert_same_state(again.state_dict(), plain)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        torch.testing.assert_close(loaded(batch(0)), plain(batch(0)), rtol=1e-6, atol=1e-6)


def _plain_inner(param: Any) -> list[str]:
    names = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    return [name for name in names if type(getattr(param, name)) is Tensor]


@pytest.mark.parametrize("form", [*FORMS, "rows"])
@on_ranks(2)
def test_files_without_the_class_load(tmp_path: Path, form: str) -> None:
    plain = quantised("two tensors")
    fsdp.save(tmp_path / "saved", sharded(quantised("two tensors"), form))
    save_by_first(load_file(tmp_path / "saved" / "model.safetensors"), tmp_path / "old.safetensors")
    other = quantised("two tensors")
    with torch.no_grad():
        other[0].base.weight.values.zero_()
    model = sharded(other, form)
    fsdp.load_safetensors(model, tmp_path / "old.safetensors")
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


@parametrize_pairs(source=["flat", "orig", "single", "rows", "plain"], target=["rows", "flat", "single"])
@on_ranks(2)
def test_files_have_integers_as_integers(tmp_path: Path, source: str, target: str) -> None:
    plain = quantised("plain dtypes")
    if source == "plain":
        (tmp_path / "saved").mkdir(exist_ok=True)
        save_by_first(plain.state_dict(), tmp_path / "saved" / "model.safetensors")
    else:
        fsdp.save(tmp_path / "saved", sharded(quantised("plain dtypes"), source))
    files = load_file(tmp_path / "saved" / "model.safetensors")
    for name, value in plain.state_dict().items():
        assert (files[name].dtype, files[name].shape) == (value.dtype, value.shape)
        assert torch.equal(files[name].float(), value.float())
    again = quantised("plain dtypes")
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    model = sharded(again, target)
    fsdp.load_safetensors(model, tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


@parametrize_pairs(kind=KINDS, form=[*FORMS], at_first=[False, True])
@on_ranks(2)
def test_torch_saves_state_dicts_and_summoned_parameters(kind: str, form: str, at_first: bool) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        plain, model = quantised(kind), sharded(quantised(kind), form)
        state = model.state_dict(rank0_only=at_first)
        if state:
            file, expected = io.BytesIO(), io.BytesIO()
            torch.save(state, file)
            torch.save(plain.state_dict(), expected)
            assert file.tell() == expected.tell()  # and so nothing beside the values
            file.seek(0)
            assert_same_state(torch.load(file, weights_only=False), plain)
        with model.summon_full_params(rank0_only=at_first):
            torch.save(dict(model.named_parameters()), io.BytesIO())


@parametrize_pairs(kind=KINDS, form=[*FORMS])
@on_ranks(2)
def test_a_state_dict_of_the_plain_model_loads(kind: str, form: str) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        plain, model = quantised(kind), sharded(quantised(kind), form)
        train(plain)
        train(model, range(5, 7))
        model.load_state_dict(plain.state_dict())
        assert_same_state(model.state_dict(), plain)
        only_first = plain.state_dict() if dist.get_rank() == 0 else {}
        model.load_state_dict(only_first, rank0_only=True)
        assert_same_state(model.state_dict(), plain)
        local = sharded(quantised(kind), form)
        local.load_sharded_state_dict(model.sharded_state_dict())
        assert_same_state(local.state_dict(), plain)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_value_in_another_form_is_an_error_and_changes_nothing(form: str) -> None:
    model, plain = sharded(quantised("two tensors"), form), quantised("two tensors")
    before = model.state_dict()
    state = plain.state_dict()
    state["2.base.weight"] = torch.zeros(9, 17)
    state["0.base.bias"] = torch.ones(17)
    with pytest.raises(RuntimeError, match=r"base\.weight is Rows8 \[9, 17\].*cannot be set to \[9, 17\] float32"):
        model.load_state_dict(state)
    after = model.state_dict()
    assert all(torch.equal(plain_values(before[name]), plain_values(after[name])) for name in before)


PLACES: dict[str, Any] = {
    "hybrid": lambda: {"process_group": mesh_of(2, 2)},
    "replicas": lambda: {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "zero-1": lambda: {"sharding_strategy": ShardingStrategy.SHARD_OPTIM},
    "hfsdp": lambda: {"process_group": mesh_of(2, 2), "sharding_strategy": ShardingStrategy.HYBRID_SHARD_OPTIM},
    "neighbours": lambda: {"reshard_after_forward": 2},
    "host": lambda: {"cpu_offload": True},
}


@pytest.mark.parametrize("place", PLACES)
@on_ranks(4)
def test_bytes_follow_placements(place: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), "orig", **PLACES[place]())
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    assert_same_state(model.state_dict(), plain)


@on_ranks(2)
def test_the_first_rank_s_bytes_reach_ranks_without_values() -> None:
    plain = quantised("two tensors")
    mine = quantised("two tensors")
    if dist.get_rank() == 1:
        for layer in (mine[0], mine[2]):
            weight = layer.base.weight
            meta = Rows8(weight.values.to("meta"), weight.scale.to("meta"), weight.dtype)
            layer.base.weight = nn.Parameter(meta, requires_grad=False)
    model = sharded(mine, "orig", sync_module_states=True)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    assert_same_state(model.state_dict(), plain)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_copies_and_averages_keep_the_bytes(form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    average = EMA(model, decay=0.5)
    for step in range(3):
        train(model, range(step, step + 1))
        average.update_parameters(model)
        train(plain, range(step, step + 1))
    copied = copy.deepcopy(model)
    pickled = pickle.loads(pickle.dumps(model))
    for wrapper in fsdp.get_fsdp_instances(pickled):
        wrapper.process_group = dist.group.WORLD
    for each in (model, copied, pickled):
        assert_same_state(each.state_dict(), plain)
    for layer in ("0", "2"):
        key = f"{layer}.base.weight"
        assert torch.equal(plain_values(average.module.state_dict()[key]), plain_values(plain.state_dict()[key]))
    torch.testing.assert_close(train(copied), train(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_summoned_parameters_have_their_class_and_take_new_values(form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)

    def merge(net: Any) -> None:
        layer = net[0].module if net is model else net[0]
        merged = layer.base.weight.plain() + layer.up.weight @ layer.down.weight
        layer.base.weight = nn.Parameter(Rows8.of(merged.detach()), requires_grad=False)
        layer.up.weight.data.zero_()

    train(model)
    train(plain)
    with model.summon_full_params():
        assert type(model[0].module.base.weight) is Rows8
        merge(model)
    merge(plain)
    torch.testing.assert_close(model(batch(9)), plain(batch(9)), rtol=1e-4, atol=1e-5)


@parametrize_pairs(form=[*FORMS], rank0_only=[False, True])
@on_ranks(2)
def test_writes_to_inner_tensors_of_a_summoned_parameter_are_kept(form: str, rank0_only: bool) -> None:
    model = sharded(quantised("two tensors"), form)
    train(model, range(1))
    with model.summon_full_params(rank0_only=rank0_only):
        if not rank0_only or dist.get_rank() == 0:
            model[0].module.base.weight.values.fill_(3)
            model[2].module.base.weight.scale = torch.ones(9, 1)
    state = model.state_dict()
    assert state["0.base.weight"].values.eq(3).all()
    assert state["2.base.weight"].scale.eq(1).all()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_other_writes_to_inner_tensors_on_a_rank_are_an_error(form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    with (
        pytest.raises(RuntimeError, match=r"base\.weight.*Make the same changes on every rank"),
        model.summon_full_params(),
    ):
        model[0].module.base.weight.values.fill_(dist.get_rank())
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


class Opaque(Rows8):
    """A class with no operation of values but a linear layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].values.float() * args[1].scale, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values.detach(), args[0].scale.detach(), args[0].dtype)
        raise NotImplementedError(f"{func} of an Opaque")


@pytest.mark.parametrize("form", [*FORMS, "rows"])
@on_ranks(2)
def test_a_class_needs_no_operations_but_those_of_the_model(form: str) -> None:
    plain, model = of_class(Opaque), sharded(of_class(Opaque), form)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    assert fsdp.plan(of_class(Opaque), world_size=2).units
    copy.deepcopy(model)
    EMA(model, decay=0.5).update_parameters(model)
    if form == "rows":
        return
    model.load_state_dict(model.state_dict(dtype=torch.bfloat16))
    for rank0_only in (False, True):
        with model.summon_full_params(rank0_only=rank0_only, with_grads=True, offload_to_cpu=True):
            if not rank0_only or dist.get_rank() == 0:
                weight = model[0].module.base.weight
                changed = Opaque(weight.values + 1, weight.scale, weight.dtype)
                model[0].module.base.weight = nn.Parameter(changed, requires_grad=False)
    found = model.state_dict()["0.base.weight"].values
    assert torch.equal(found, plain[0].base.weight.values + 2)


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_a_summoned_parameter_of_another_form_is_an_error_on_all_ranks(rank0_only: bool) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), "orig")

    def spoil() -> None:
        with model.summon_full_params(rank0_only=rank0_only):
            if not rank0_only or dist.get_rank() == 0:
                model[0].module.base.weight.scale = None

    with pytest.raises(RuntimeError, match=r"base\.weight is Rows8 \[17, 33\].*cannot be set to"):
        spoil()
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


class Sending(Rows8):
    """A class with torch's all-gather extension, which is not needed for frozen bytes, as NF4 has."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        raise AssertionError


@pytest.mark.parametrize("form", [*FORMS, "rows"])
@on_ranks(2)
def test_frozen_classes_with_an_extension_are_bytes(form: str) -> None:
    plain, model = of_class(Sending), sharded(of_class(Sending), form)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    assert any(one.flat_param.dtype is torch.uint8 for one in fsdp.flat_param_handles(model))


@parametrize_pairs(kind=["two tensors", "nested", "torchao"], is_assigned=[True, False], world_size=[2, 3])
@on_ranks("world_size")
def test_rows_take_the_state_of_the_plain_model(kind: str, is_assigned: bool) -> None:
    if kind == "torchao":
        pytest.importorskip("torchao")
    plain, model = quantised(kind), sharded(quantised(kind), "rows")
    for layer in (plain[0], plain[2]):
        weight: Any = layer.base.weight
        getattr(weight, weight.__tensor_flatten__()[0][0]).neg_()
    model.load_state_dict(plain.state_dict(), assign=is_assigned)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_rows_of_bytes_may_be_assigned() -> None:
    source, model = sharded(quantised("two tensors"), "rows"), sharded(quantised("two tensors"), "rows")
    with torch.no_grad():
        for layer in (source[0], source[2]):
            layer.base.weight.zero_()
    model.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(train(model), train(source), rtol=0, atol=0)


@on_ranks(2)
def test_rows_of_bytes_refuse_values_of_another_form() -> None:
    model, state = sharded(quantised("two tensors"), "rows"), quantised("two tensors").state_dict()
    state["2.base.weight"] = plain_values(state["2.base.weight"])
    with pytest.raises(
        ValueError, match=r"base\.weight is Rows8 .*cannot be set to .*quantise the value like the model's"
    ):
        model.load_state_dict(state)


CASTS: dict[str, Any] = {
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16),
    "inside": lambda model: model[0].double(),
    "type": lambda model: model.type(torch.float16),
}


@parametrize_pairs(form=[*FORMS, "rows"], cast=[*CASTS])
@on_ranks(2)
def test_a_cast_of_bytes_is_an_error_and_changes_nothing(form: str, cast: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    with pytest.raises(RuntimeError, match=r"base\.weight is sharded as bytes \(Rows8.*before it is quantised"):
        CASTS[cast](model)
    model.float().to("cpu")
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_local_states_of_bytes_load_again_and_are_not_consolidated(form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    again = sharded(quantised("two tensors"), form)
    train(model)
    train(plain)
    again.load_local_state_dict(model.local_state_dict())
    assert_same_state(again.state_dict(), plain)
    with pytest.raises(NotImplementedError, match=r"base\.weight is sharded as bytes.*state_dict\(\)"):
        model.local_metadata_dict()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_local_states_of_other_values_than_bytes_are_an_error(form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    state = model.local_state_dict()
    state = {name: each.float() if each.dtype is torch.uint8 else each for name, each in state.items()}
    with pytest.raises(
        RuntimeError, match=r"is of torch\.float32.*bytes \(torch\.uint8\) of .*base\.weight.*quantised"
    ):
        model.load_local_state_dict(state)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """A layer that counts its calls, and changes its weight, in frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(Rows8.of(torch.randn(7, 7)), requires_grad=False)
        self.calls = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, inputs: Tensor) -> Tensor:
        made = nn.functional.linear(inputs, self.weight) * self.scale
        with torch.no_grad():
            self.weight.values.add_(1)
            self.calls.add_(1)
        return made


@parametrize_pairs(form=list(FORMS), world_size=[2, 1, 3])
@on_ranks("world_size")
def test_a_forward_may_write_to_its_bytes(form: str) -> None:
    plain, model = Counting(), FullyShardedDataParallel(Counting(), **FORMS[form])
    for _ in range(3):
        torch.testing.assert_close(model(torch.ones(2, 7)), plain(torch.ones(2, 7)))
    state = model.state_dict()
    assert state["calls"].tolist() == [3, 3, 3]
    assert torch.equal(state["weight"].values, plain.weight.values)


class Leaking(Counting):
    """A layer that keeps a result of its weight's inner tensors, which backward reads, beside its output."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.kept = (self.scale * self.weight.scale.view(-1)).sum()  # autograd saves the inner tensor
        return inputs.detach()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_backward_does_not_read_freed_bytes(form: str) -> None:
    model = FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(Leaking(), **FORMS[form]), nn.Linear(7, 7)))
    model(torch.ones(2, 7))
    kept = model[0].module.kept
    with torch.no_grad():
        model(torch.ones(2, 7))  # gathers, and frees
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(kept, _leaves_of(kept))


def _leaves_of(result: Tensor) -> list[Tensor]:
    """Return the leaves at the ends of a small graph."""
    ends, ahead = [], [result.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None:
            ends += [node.variable] if hasattr(node, "variable") else []
            ahead += [each for each, _ in node.next_functions]
    return ends


@on_ranks(2)
def test_other_metadata_on_a_rank_is_an_error_on_all() -> None:
    dtype = torch.float32 if dist.get_rank() == 0 else torch.bfloat16
    layer = Adapted(8, 8)
    weight = Rows8.of(layer.base.weight)
    layer.base.weight = nn.Parameter(Rows8(weight.values, weight.scale, dtype), requires_grad=False)
    model = FullyShardedDataParallel(layer)
    with pytest.raises(RuntimeError, match=r"Rows8 \[8, 8\].*torch\.bfloat16"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_a_class_that_mixed_precision_does_not_cast_is_refused_by_name() -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"base\.weight is Rows8.*does not cast to torch\.bfloat16.*before it is quant"
    ):
        FullyShardedDataParallel(quantised("two tensors"), mixed_precision=policy)
    model = FullyShardedDataParallel(quantised("two tensors", torch.bfloat16), mixed_precision=policy)
    plain = quantised("two tensors", torch.bfloat16)
    ours, theirs = train(model, range(2)), train(plain, range(2), dtype=torch.bfloat16)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@on_ranks(1)
def test_a_trained_quantised_weight_is_an_error_that_names_its_class() -> None:
    for shard in (fsdp.shard, lambda model, units: [fully_shard(one) for one in model.modules() if type(one) in units]):
        with pytest.raises(TypeError, match=r"base\.weight is a Rows8 parameter.*freeze it"):
            shard(quantised("two tensors").requires_grad_(True), units={Adapted})


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_bytes_cannot_be_trained(form: str) -> None:
    layer = quantised("two tensors")
    layer[0].base.weight.requires_grad_(True)
    with pytest.raises(TypeError, match=r"0\.base\.weight is a Rows8 parameter.*freeze it"):
        FullyShardedDataParallel(layer, **FORMS[form])
    model = sharded(quantised("two tensors"), form)
    with pytest.raises(RuntimeError, match=r"base\.weight is sharded as bytes, which cannot be trained"):
        model[0].module.base.requires_grad_(True)
    train(model, range(1))


class Tied(nn.Module):
    """Two layers with one quantised weight, beside other weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Adapted(8, 8), Adapted(8, 8)
        self.first.base.weight = nn.Parameter(Rows8.of(self.first.base.weight), requires_grad=False)
        self.first.other = nn.Parameter(Rows8.of(torch.randn(8, 8)), requires_grad=False)
        self.second.base.weight = self.first.base.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(inputs))))


@pytest.mark.parametrize("form", [*FORMS, "rows"])
@on_ranks(2)
def test_a_quantised_weight_may_be_tied(form: str) -> None:
    plain, net = Tied(), Tied()
    if form == "rows":
        for layer in (net.first, net.second):
            fully_shard(layer)
        model: Any = fully_shard(net)
    else:
        model = FullyShardedDataParallel(net, **FORMS[form])
    losses = []
    for each in (model, plain):
        optimizer = torch.optim.SGD(trained(each), lr=0.1)
        for step in range(3):
            loss = each(batch(step)[:, :8]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [*FORMS, "rows"])
@on_ranks(2)
def test_parked_bytes_come_back(tmp_path: Path, form: str) -> None:
    plain, model = quantised("two tensors"), sharded(quantised("two tensors"), form)
    train(model)
    with fsdp.parked(model, to=tmp_path), pytest.raises(RuntimeError, match="unpark"):
        model(batch(0))
    train(plain)
    torch.testing.assert_close(train(model), train(plain), rtol=1e-5, atol=1e-6)
    with fsdp.resident(model), torch.no_grad():
        torch.testing.assert_close(model(batch(3)), plain(batch(3)), rtol=1e-5, atol=1e-6)
