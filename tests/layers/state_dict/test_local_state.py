"""Local state dicts: each rank's shards as they are, without any word to another rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import EMA, FullyShardedDataParallel, MixedPrecision, get_fsdp_instances
from tests.helpers.equality import assert_same
from tests.helpers.local_shards import Awkward, awkward, different, through_files
from tests.helpers.models import Wrap, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

FORMS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]
# Names


@on_ranks(2)
def test_flat_parameters_are_under_the_path_of_their_wrapper_and_others_under_their_own() -> None:
    keys, *others = (list(nested_mlp(fully_sharded(**form)).local_state_dict()) for form in FORMS)  # type: ignore[operator]
    assert keys == ["flat_param_0", "trunk.flat_param_0", "trunk.2.flat_param_0", "gate.flat_param_0"]
    assert [sorted(other) for other in others] == [sorted(nested_mlp().state_dict())] * 2
    flat = ["flat_param_0", "flat_param_1", "flat_param_2", "inner.flat_param_0", "few.flat_param_0"]
    assert [key for key in awkward(fully_sharded()).local_state_dict() if "flat_param" in key] == flat  # type: ignore[operator]


@on_ranks(2)
def test_prefix_and_destination_are_those_of_nn_module() -> None:
    model: Any = nested_mlp(fully_sharded())
    given = {"before": torch.zeros(1)}
    assert model.local_state_dict(given, "a.") is given
    assert list(given)[:3] == ["before", "a.flat_param_0", "a.trunk.flat_param_0"]
    assert model.local_state_dict(keep_vars=True)["flat_param_0"] is model.module.flat_param


@parametrize_pairs(form=FORMS, on_disk=[False, True])
@on_ranks(2)
def test_tensors_are_the_model_s_own_and_plain(tmp_path: Path, form: dict[str, Any], on_disk: bool) -> None:
    offload = {"offload": "disk", "offload_folder": tmp_path} if on_disk else {}
    model: Any = nested_mlp(fully_sharded(**form, **offload))
    state, live = model.local_state_dict(), model.local_state_dict(keep_vars=True)
    assert list(state) == list(live)
    for name, value in state.items():
        assert type(value) is Tensor
        assert not value.requires_grad
        assert value.untyped_storage().data_ptr() == live[name].untyped_storage().data_ptr()


# Round trips


@parametrize_pairs(
    options=[
        *FORMS,
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"reshard_after_forward": False},
        {"move_params_to_cpu": True},
    ],
    world_size=[2, 1],
)
def test_training_goes_on_from_a_loaded_local_state(ranks: RankPool, options: dict[str, Any], world_size: int) -> None:
    ranks(world_size).run(_trains_on, options)


def _trains_on(options: dict[str, Any]) -> None:
    """Two models step alike after one has loaded what the other had, in the middle of its own training."""
    one, other = (nested_mlp(fully_sharded(**options), seed=seed) for seed in (0, 1))
    for model in (one, other):
        _step(model, 0)
    saved = {key: value.clone() for key, value in one.local_state_dict().items()}  # type: ignore[operator]
    other.load_local_state_dict(saved)  # type: ignore[operator]
    for model in (one, other):
        _step(model, 1)
    assert_same(other.state_dict(), one.state_dict())
    assert any(not torch.equal(saved[key], value) for key, value in one.local_state_dict().items())  # type: ignore[operator]


def _step(model: nn.Module, number: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    once(model, torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())))
    optimizer.step()


@on_ranks(2)
def test_ranks_may_be_given_different_keys() -> None:
    """A unit that stays whole must be gathered again by all ranks, though one of them was given nothing."""
    model: Any = nested_mlp(fully_sharded(reshard_after_forward=False, disable_reshard_on_root=True))
    inputs = torch.randn(4, 5)
    model(inputs)  # and no backward
    expected = model.state_dict()
    state = {key: value + 1 for key, value in model.local_state_dict().items() if dist.get_rank() == 0}
    result = model.load_local_state_dict(state, strict=False)
    assert bool(result.missing_keys) is (dist.get_rank() == 1)
    model(inputs).sum().backward()
    found = model.state_dict()
    assert torch.equal(found["trunk.0.weight"][:5], expected["trunk.0.weight"][:5] + 1)
    assert torch.equal(found["trunk.0.weight"][6:], expected["trunk.0.weight"][6:])


@on_ranks(2)
def test_ranks_that_were_wrapped_with_different_values_agree_after_loading() -> None:
    state = nested_mlp(fully_sharded()).local_state_dict()  # type: ignore[operator]
    model: Any = nested_mlp(fully_sharded(), seed=dist.get_rank())
    model.load_local_state_dict(state)
    model(torch.randn(4, 5))
    assert_same(model.state_dict(), nested_mlp().state_dict())


@on_ranks(2)
def test_so_they_do_if_each_had_its_own_part_right() -> None:
    def make(odd: slice) -> Any:
        layer = nn.Linear(6, 1, bias=False)
        nn.init.zeros_(layer.weight)
        layer.weight.data[0, odd] = 1.0
        return FullyShardedDataParallel(layer)

    rank = dist.get_rank()
    state = make(slice(0)).local_state_dict()
    model = make(slice(2, 4) if rank != 1 else slice(4, 6))  # elsewhere than in its own two elements
    model.load_local_state_dict(state)
    assert torch.equal(model(torch.ones(1, 6)), torch.zeros(1, 1))


@on_ranks(2)
def test_an_optimizer_keeps_stepping_what_was_loaded() -> None:
    model: Any = nested_mlp(fully_sharded())
    optimizer = sgd_with_momentum(model.parameters())
    listed = list(model.parameters())
    model.load_local_state_dict({key: value + 1 for key, value in model.local_state_dict().items()})
    assert all(one is two for one, two in zip(listed, model.parameters(), strict=True))
    plain = nested_mlp()
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1)
    plain_optimizer = sgd_with_momentum(plain.parameters())
    inputs = torch.randn(4, 5)
    for each, own in ((model, optimizer), (plain, plain_optimizer)):
        for _ in range(2):
            own.zero_grad()
            once(each, inputs)
            own.step()
    for (name, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
def test_buffers_are_saved_in_their_own_dtype_and_loaded_into_the_computed_one() -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model: Any = awkward(fully_sharded(mixed_precision=low))
    value = 1 + torch.arange(6.0).view(2, 3) / 4096  # more than bfloat16 can hold
    state = model.local_state_dict()
    assert state["table"].dtype == torch.float32
    model.load_local_state_dict(state | {"table": value, "exit.same": value})
    assert model.module.module.table.dtype == torch.bfloat16
    assert torch.equal(model.local_state_dict()["table"], value)


@on_ranks(2)
def test_a_local_state_gives_values_to_a_model_from_the_meta_device(tmp_path: Path) -> None:
    weights, _ = through_files(awkward(fully_sharded()), tmp_path)
    with torch.device("meta"):
        empty: Any = fully_sharded()(Awkward(fully_sharded()))
    with pytest.raises(RuntimeError, match="have no values yet"):
        empty.local_state_dict()
    empty.load_local_state_dict(weights[dist.get_rank()])
    empty.module.module.scratch = torch.zeros(4)  # which no state dict has
    assert_same(empty.state_dict(), awkward().state_dict())


@on_ranks(2)
def test_ignored_parameters_are_whole() -> None:
    plain: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model: Any = FullyShardedDataParallel(plain, ignored_modules=[plain[1]])
    state = {key: value.clone() for key, value in model.local_state_dict().items()}
    assert state["1.weight"].shape == (3, 5)
    with torch.no_grad():
        plain[1].weight.zero_()
    model.load_local_state_dict(state)
    assert torch.equal(plain[1].weight, state["1.weight"])


@on_ranks(2)
def test_a_shared_parameter_is_under_both_names() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    wrap = fully_sharded(flatten_parameters=False)
    one: Any = wrap(first)
    two: Any = wrap(second)
    two.append_shared_param(one.module.weight)
    model: Any = wrap(nn.Sequential(one, two, nn.Linear(3, 3)))
    state = {key: value + 1 for key, value in model.local_state_dict().items()}
    assert {"0.weight", "1.weight"} <= state.keys()
    model.load_local_state_dict(state)
    whole = model.state_dict()
    assert torch.equal(whole["0.weight"], whole["1.weight"])
    assert torch.equal(model.local_state_dict()["1.weight"], state["1.weight"])


@on_ranks(2)
def test_names_with_wrappers_parts_and_the_old_flat_name_are_taken() -> None:
    model: Any = nested_mlp(fully_sharded())
    raw = {name: param.detach() + 1 for name, param in model.named_parameters()}
    assert "_fsdp_wrapped_module._fpw_module.gate._fsdp_wrapped_module.flat_param_0" in raw
    raw["flat_param"] = raw.pop("_fsdp_wrapped_module.flat_param_0")
    result = model.load_local_state_dict(raw)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model.local_state_dict()["flat_param_0"], raw["flat_param"])


@on_ranks(2)
def test_an_average_s_local_state_is_its_own() -> None:
    model: Any = nested_mlp(fully_sharded())
    average: Any = EMA(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    found = average.module.local_state_dict()["flat_param_0"]
    torch.testing.assert_close(found + 1, model.local_state_dict()["flat_param_0"])


# Subclasses


class Metaseq(FullyShardedDataParallel):
    """State dicts are local ones, as in metaseq and fairseq."""

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        return super().local_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_local_state_dict(state_dict, strict=strict)


@on_ranks(2)
def test_a_subclass_whose_state_is_local_does_not_recurse() -> None:
    wrap: Wrap = partial(Metaseq)
    one, other = nested_mlp(wrap), nested_mlp(wrap, seed=1)
    saved = one.state_dict()
    assert list(saved) == list(nested_mlp(fully_sharded()).local_state_dict())  # type: ignore[operator]
    result = other.load_state_dict(saved)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(FullyShardedDataParallel.local_state_dict(other), saved)
    assert len(get_fsdp_instances(one)) == len(one.local_metadata_dict()["param_metadata"])  # type: ignore[operator]


# Refusals


@on_ranks(2)
def test_nothing_is_local_inside_summon_full_params() -> None:
    model: Any = nested_mlp(fully_sharded())
    state = model.local_state_dict()
    for summoned in (model, model.module.module.trunk):
        with summoned.summon_full_params():
            for refused in (
                model.local_state_dict,
                model.local_metadata_dict,
                partial(model.load_local_state_dict, state),
            ):
                with pytest.raises(RuntimeError, match=r"inside summon_full_params\(\)"):
                    refused()


@on_ranks(2)
def test_a_full_state_dict_is_whole_after_a_local_one_failed() -> None:
    model: Any = different(nested_mlp)

    def fail(*_: Any) -> None:
        raise KeyError("from a hook")

    hook = model.module.module.entry.register_state_dict_pre_hook(fail)
    with pytest.raises(KeyError, match="from a hook"):
        model.local_state_dict()
    hook.remove()
    assert_same(model.state_dict(), nested_mlp(seed=1).state_dict())
