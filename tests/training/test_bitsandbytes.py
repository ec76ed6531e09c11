"""The 4-bit weights of bitsandbytes are sharded with their scales, and stay those of the unsharded model."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

pytestmark = needs("bitsandbytes")

INPUTS = torch.linspace(-1, 1, 256).view(4, 64)
# With and without scales that are quantised themselves, and the dtypes that hold two or more weights.
KINDS: dict[str, dict[str, Any]] = {
    "scales": {},
    "nested": {"compress_statistics": True},
    "bfloat16": {"quant_storage": torch.bfloat16},
    "float32": {"compress_statistics": True, "quant_storage": torch.float32},
}


class Adapted(nn.Module):
    """A frozen layer of 4 bits with a low-rank adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import bitsandbytes as bnb

        how = {"compress_statistics": False, **KINDS[kind]}
        base = bnb.nn.Linear4bit(64, 96, compute_dtype=torch.float32, quant_type="nf4", **how)
        base.requires_grad_(False)
        self.base = base.to("cpu")  # which quantises
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 96, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def adapted(kind: str = "nested", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), Adapted(kind), nn.Tanh(), nn.Linear(96, 1))


def sharded(model: Any, form: str, **options: Any) -> Any:
    if form == "rows":
        fully_shard(model[1], **options)
        return fully_shard(model, **options)
    model[1] = FullyShardedDataParallel(model[1], use_orig_params=form == "orig", **options)
    return FullyShardedDataParallel(model, use_orig_params=form == "orig", **options)


def layer_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("base"))


def trained(model: Any, evaluates: bool = False) -> list[float]:
    """Train, with an evaluation after each step if it is asked for; return the losses."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        loss = model(INPUTS).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates:
            with torch.no_grad():
                model.eval()(INPUTS)
            model.train()
    return losses


class Moving(Adapted):
    """Assigns its weight again in each forward, as `peft` does on CPUs for DoRA."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.base.weight = self.base.weight.to("cpu")
        return outputs


def output_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(INPUTS)


@parametrize_pairs(kind=list(KINDS), form=["flat", "orig", "rows"], world_size=[1, 2, 3])
@on_ranks("world_size")
def test_adapters_train_beside_sharded_weights_as_unsharded(kind: str, form: str, world_size: int) -> None:
    plain, model = adapted(kind), sharded(adapted(kind), form)
    # On a CPU with bfloat16 instructions, an evaluation of the plain layer would convert its weight for good.
    assert trained(model, evaluates=True) == trained(plain)
    (handle,) = [one for one in fsdp.flat_param_handles(model) if one.flat_param.dtype is torch.uint8]
    first, second = layer_of(plain).weight.quant_state, layer_of(plain).weight.quant_state.state2
    scales = [first.absmax, first.code, *([first.offset, second.absmax, second.code] if second else [])]
    nbytes = sum(-(-one.nbytes // 16) * 16 for one in [layer_of(plain).weight.data, *scales])
    assert 0 <= handle.flat_param.numel() - nbytes / world_size < 16
    assert layer_of(model).quant_state is None  # it would keep all scales on each rank


@parametrize_pairs(kind=list(KINDS), form=["flat", "orig", "rows"], reshard=[True, False])
@on_ranks(2)
def test_a_forward_may_assign_the_weight_again(kind: str, form: str, reshard: bool) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), Moving(kind), nn.Tanh(), nn.Linear(96, 1))

    model = sharded(made(), form, reshard_after_forward=reshard)
    (handle,) = [one for one in fsdp.flat_param_handles(model) if one.flat_param.dtype is torch.uint8]
    before = handle.flat_param._version
    assert trained(model) == trained(made())
    assert handle.flat_param._version == before  # it is no new value, which would be gathered again


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_state_dicts_and_files_have_weights_with_their_scales(form: str, tmp_path: Path) -> None:
    model, other = sharded(adapted(), form), sharded(adapted(seed=1), form)
    trained(model)
    fsdp.save(tmp_path / "model", model)
    plain = adapted(seed=2)
    for each in (other, plain):
        assert not torch.equal(output_of(each), output_of(model))
        fsdp.load(tmp_path / "model", each)
        assert torch.equal(output_of(each), output_of(model))
    fsdp.save(tmp_path / "plain", plain)
    again = sharded(adapted(seed=3), form)
    fsdp.load(tmp_path / "plain", again)
    assert torch.equal(output_of(again), output_of(model))
    another = sharded(adapted(seed=4), form)
    another.load_state_dict(model.state_dict())
    assert torch.equal(output_of(another), output_of(model))
    another = sharded(adapted(seed=4), form)
    another.load_state_dict(plain.state_dict())  # the plain layer itself does not load it
    assert torch.equal(output_of(another), output_of(model))


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_state_dicts_of_the_wrapper_are_the_plain_ones(form: str) -> None:
    found, expected = sharded(adapted(), form).state_dict(), adapted().state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    files = io.BytesIO(), io.BytesIO()
    for state, file in zip((found, expected), files, strict=True):
        torch.save(state, file)
    assert files[0].tell() == files[1].tell()
    assert save({name: value.as_subclass(Tensor) for name, value in found.items()})


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_the_first_rank_alone_may_have_the_state_dict(form: str) -> None:
    model, expected = sharded(adapted(), form), adapted().state_dict()
    found = model.state_dict(rank0_only=True)
    assert list(found) == (list(expected) if dist.get_rank() == 0 else [])
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@on_ranks(2)
def test_a_state_dict_reshards_so_that_no_entry_is_a_view_of_memory_that_is_freed() -> None:
    model = sharded(adapted(), "rows")
    expected = list(model.state_dict())
    model[1].unshard()
    assert not isinstance(layer_of(model).weight, DTensor)
    assert list(model.state_dict()) == expected
    assert isinstance(layer_of(model).weight, DTensor)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_copies_compute_by_themselves(form: str) -> None:
    model = sharded(adapted(), form)
    expected = trained(model)
    assert trained(copy.deepcopy(sharded(adapted(), form))) == expected
    if form != "rows":
        again = pickle.loads(pickle.dumps(sharded(adapted(), form)))
        for wrapper in fsdp.get_fsdp_instances(again):
            wrapper.process_group = dist.group.WORLD
        assert trained(again) == expected


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_a_weight_that_is_quantised_again_while_summoned_is_kept(form: str) -> None:
    from bitsandbytes.nn import Params4bit

    model, plain = sharded(adapted(), form), adapted()
    new = torch.linspace(-2, 2, 96 * 64).view(96, 64)
    with model.summon_full_params():
        layer = layer_of(model)
        assert type(layer.weight) is Params4bit
        how = {"quant_type": "nf4", "compress_statistics": True}
        layer.weight = Params4bit(new, requires_grad=False, **how).to("cpu")
    layer_of(plain).weight = Params4bit(new, requires_grad=False, **how).to("cpu")
    assert torch.equal(output_of(model), output_of(plain))


@pytest.mark.parametrize("form", ["flat", "rows"])
@on_ranks(2)
def test_another_form_is_an_error_by_name_and_changes_nothing(form: str, tmp_path: Path) -> None:
    model, other = sharded(adapted("scales"), form), sharded(adapted("nested"), form)
    before = output_of(other)
    fsdp.save(tmp_path / "model", model)
    with pytest.raises(RuntimeError, match=r"1\.base\.weight in .* Params4bit.*quantised in the same way"):
        fsdp.load(tmp_path / "model", other)
    with pytest.raises((RuntimeError, ValueError), match=r"base\.weight is Params4bit.*quantise the value like"):
        other.load_state_dict(adapted("scales").state_dict())
    assert torch.equal(output_of(other), before)


@parametrize_pairs(
    lacks=["absmax", "quant_state.bitsandbytes__nf4"], form=["flat", "orig", "rows"], strict=[True, False]
)
@on_ranks(2)
def test_a_state_without_some_scales_is_an_error_by_name(lacks: str, form: str, strict: bool) -> None:
    model = sharded(adapted(), form)
    before = output_of(model)
    state = {name: value for name, value in adapted(seed=1).state_dict().items() if not name.endswith(f".{lacks}")}
    with pytest.raises((RuntimeError, ValueError), match=r"base\.weight is Params4bit.*additional entries.*load all"):
        model.load_state_dict(state, strict=strict)
    # torch loads a module after the other, and under `fully_shard` those before have their values.
    assert form == "rows" or torch.equal(output_of(model), before)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_the_dtype_of_their_storage_is_not_that_of_the_computation(form: str) -> None:
    def made(kind: str) -> Any:
        if form == "rows":
            return sharded(adapted(kind), form, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        return sharded(adapted(kind), form, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))

    assert trained(made("float32")) == trained(made("nested"))


@on_ranks(2)
def test_weights_that_are_not_quantised_yet_are_an_error_with_the_remedy() -> None:
    import bitsandbytes as bnb

    with pytest.raises(TypeError, match=r"0\.weight: a Params4bit .* not quantised yet, which module\.to"):
        FullyShardedDataParallel(nn.Sequential(bnb.nn.Linear4bit(64, 32)))


def test_a_plan_counts_them_and_leaves_the_model_as_it_is() -> None:
    model = adapted()
    before = output_of(model)
    plan = fsdp.plan(model, world_size=2, sample=INPUTS)
    (unit,) = plan.units
    trained_bytes = 4 * sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert unit.unsharded_bytes > trained_bytes + layer_of(model).weight.nbytes
    assert torch.equal(output_of(model), before)


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_embeddings_of_4_bits_compute_as_unsharded(form: str) -> None:
    from bitsandbytes.nn import EmbeddingNF4

    def made() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Identity(), nn.Sequential(EmbeddingNF4(32, 64).to("cpu"), nn.Linear(64, 2)))

    model, plain, tokens = sharded(made(), form), made(), torch.arange(12).view(3, 4)
    losses = [each(tokens).square().sum() for each in (model, plain)]
    losses[0].backward()
    assert losses[0] == losses[1]


@on_ranks(2)
def test_8_bit_weights_are_refused_and_may_be_ignored() -> None:
    import bitsandbytes as bnb

    def made() -> Any:
        weight = bnb.nn.Int8Params(torch.ones(32, 64, dtype=torch.int8), requires_grad=False)
        return nn.Sequential(nn.Linear(64, 64), nn.ParameterDict({"weight": weight}))

    with pytest.raises(TypeError, match=r"1\.weight is a frozen Int8Params.*outside the tensor.*ignored_param"):
        FullyShardedDataParallel(made())
    model = made()
    FullyShardedDataParallel(model, ignored_parameters=[model[1]["weight"]])


@on_ranks(2)
def test_ignored_weights_are_saved_with_their_scales(tmp_path: Path) -> None:
    def made(seed: int) -> Any:
        model = adapted(seed=seed)
        return FullyShardedDataParallel(model, ignored_parameters=[model[1].base.weight])

    model, other = made(0), made(1)
    fsdp.save(tmp_path / "model", model)
    fsdp.load(tmp_path / "model", other)
    assert torch.equal(output_of(other), output_of(model))
    again = sharded(adapted(seed=2), "rows")
    fsdp.load(tmp_path / "model", again)
    assert torch.equal(output_of(again), output_of(model))
