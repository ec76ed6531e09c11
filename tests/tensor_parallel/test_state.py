"""Parameters that are `DTensor`s are saved and loaded as whole tensors, and seen as `DTensor`s inside of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers.equality import assert_same_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import SENTENCES, cube, gpt, mesh_of, over_data, perceptron

OPTIONS = [{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"move_params_to_cpu": True}]

every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def tokens(seed: int = 0) -> Tensor:
    return SENTENCES.batch(torch.Generator().manual_seed(seed), 4)[0]


def other_values() -> dict[str, Tensor]:
    """A state of the plain model."""
    return gpt(seed=1).state_dict()


# Saving


@parametrize_cases(
    at_most=5,
    shape=[(2, 2), (1, 2), (2, 1)],
    kind=["heads", "sequence"],
    model=[{}, {"vocabulary": True}, {"vocabulary": True, "tied": True}, {"recompute": True}],
    options=OPTIONS,
)
@on_ranks(lambda case: case.shape[0] * case.shape[1])
def test_the_state_dict_is_that_of_the_plain_model(case: Case) -> None:
    how = {"kind": case.kind, **case.model}
    mesh = mesh_of(*case.shape)
    model = gpt(over_data(mesh, **case.options), mesh=mesh, **how)
    plain = gpt(tied=how.get("tied", False))
    assert_same_state(model.state_dict(), plain.state_dict())
    with model.summon_full_params():  # type: ignore[operator]
        assert_same_state(model.state_dict(), plain.state_dict())


@on_ranks(4)
def test_tied_parameters_are_saved_once() -> None:
    mesh = mesh_of(2, 2)
    state = gpt(over_data(mesh), mesh=mesh, vocabulary=True, tied=True).state_dict()
    assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()


@parametrize_pairs(hidden=[7, 1], world_size=[4, 3])
def test_uneven_parts_are_saved_and_loaded(ranks: RankPool, world_size: int, hidden: int) -> None:
    ranks(world_size).run(_save_and_load_uneven if world_size == 4 else _save_and_load_in_three_parts, hidden)


def _save_and_load_uneven(hidden: int) -> None:
    _save_and_load(mesh_of(2, 2), "tp", hidden, [[Shard(0)], [Shard(1)]])
    _save_and_load(cube(), ("a", "b"), hidden, [[Shard(0), Shard(0)], [Shard(1), Replicate()]])


def _save_and_load_in_three_parts(hidden: int) -> None:
    _save_and_load(mesh_of(1, 3), "tp", hidden, [[Shard(0)], [Shard(1)]])


def _save_and_load(mesh: DeviceMesh, tensor: Any, hidden: int, placements: Any) -> None:
    cut: Any = {"mesh": mesh[tensor], "hidden": hidden, "placements": placements}
    model, plain = perceptron(over_data(mesh), **cut), perceptron(**cut)
    assert_same_state(model.state_dict(), plain.state_dict())
    doubled = {name: 2 * value for name, value in plain.state_dict().items()}
    model.load_state_dict(doubled)
    assert_same_state(model.state_dict(), doubled)


@on_ranks(4)
def test_saved_tensors_are_the_callers_own() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh, kind="sequence")
    with model.summon_full_params():  # type: ignore[operator]
        for value in model.state_dict().values():
            value.zero_()
    assert_same_state(model.state_dict(), gpt().state_dict())


@on_ranks(4)
def test_a_state_dict_can_be_cast() -> None:
    mesh = mesh_of(2, 2)
    state = gpt(over_data(mesh), mesh=mesh).state_dict(dtype=torch.bfloat16)  # type: ignore[call-overload]
    assert_same_state(state, gpt().bfloat16().state_dict())


# Loading


@parametrize_pairs(options=OPTIONS, kind=["heads", "sequence"])
@on_ranks(4)
def test_a_plain_state_dict_is_loaded(kind: str, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh, **options), mesh=mesh, kind=kind, vocabulary=True)
    model.load_state_dict(other_values())
    assert_same_state(model.state_dict(), other_values())
    plain = gpt(seed=1)
    torch.testing.assert_close(model(tokens()), plain(tokens()))


@on_ranks(4)
def test_a_state_dict_of_dtensors_is_loaded() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    # Spread as the parameters are, and in other ways.
    for spread in ([Shard(0)], [Replicate()]):
        model.load_state_dict(gpt().state_dict())
        with model.summon_full_params():  # type: ignore[operator]
            names = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}
        given = {
            name: distribute_tensor(value, mesh["tp"], spread) if name in names else value
            for name, value in other_values().items()
        }
        model.load_state_dict(given)
        assert_same_state(model.state_dict(), other_values())


@on_ranks(4)
def test_loading_inside_summon_full_params_is_kept() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    with model.summon_full_params():  # type: ignore[operator]
        model.load_state_dict(other_values())
    assert_same_state(model.state_dict(), other_values())


@on_ranks(4)
def test_other_shapes_are_reported_in_whole_shapes() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    state = other_values()
    state["layers.0.query.weight"] = torch.zeros(4, 8)  # that of the local part
    with pytest.raises(RuntimeError, match=r"layers\.0\.query\.weight.*\[4, 8\].*\[8, 8\]"):
        model.load_state_dict(state)
    state.pop("layers.0.query.weight")
    assert model.load_state_dict(state, strict=False).missing_keys == ["layers.0.query.weight"]
    expected = state | {"layers.0.query.weight": gpt().state_dict()["layers.0.query.weight"]}
    assert_same_state(model.state_dict(), {name: expected[name] for name in other_values()})


# Summoning


@every_option
@on_ranks(4)
def test_modules_hold_dtensors_inside_summon_full_params(options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh, **options), mesh=mesh)
    plain = gpt()
    with model.summon_full_params(), torch.no_grad():  # type: ignore[operator]
        names = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}
        cut = ("query.weight", "key.weight", "value.weight", "out.weight", "out.bias")
        cut += ("widen.weight", "widen.bias", "narrow.weight", "narrow.bias")
        assert names == {f"layers.{number}.{name}" for number in range(2) for name in cut}
        torch.testing.assert_close(model(tokens()), plain(tokens()))
        for name, param in model.named_parameters():
            param.mul_(2)
            plain.get_parameter(name).mul_(2)
    assert_same_state(model.state_dict(), plain.state_dict())
    torch.testing.assert_close(model(tokens()), plain(tokens()))


@pytest.mark.parametrize("spread", ["plain", "as it was", "in another way"])
@on_ranks(4)
def test_parameters_are_assigned_inside_summon_full_params(spread: str) -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    name, value = "layers.0.query.weight", torch.arange(64.0).view(8, 8)
    with model.summon_full_params():  # type: ignore[operator]
        query = _query(model)
        assert isinstance(query.weight, DTensor)
        query.weight = nn.Parameter(_spread(value, mesh, spread))
    expected = gpt().state_dict() | {name: value}
    assert_same_state(model.state_dict(), expected)


def _query(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("query"))


def _spread(value: Tensor, mesh: DeviceMesh, how: str) -> Tensor:
    if how == "plain":
        return value
    return distribute_tensor(value, mesh["tp"], [Shard(0) if how == "as it was" else Shard(1)])


@on_ranks(4)
def test_assigned_parameters_of_a_part_are_refused() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    with (
        pytest.raises(RuntimeError, match=r"query\.weight: expected shape \(8, 8\), got \(4, 8\)"),
        model.summon_full_params(),  # type: ignore[operator]
    ):
        _query(model).weight = nn.Parameter(torch.zeros(4, 8))
    assert_same_state(model.state_dict(), gpt().state_dict())


@on_ranks(4)
def test_sharded_parameters_show_whole_shapes() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    weight = _query(model).weight
    assert (weight.shape, weight.dtype) == ((8, 8), torch.float32)
    with pytest.raises(RuntimeError, match="summon_full_params"):
        weight.sum()
    # What is stored is a half of the half.
    held = sum(param.numel() for param in model.parameters())
    whole = {name: value.numel() for name, value in gpt().state_dict().items()}
    cut = sum(n for name, n in whole.items() if any(part in name for part in ("query", "key", "value", "widen")))
    cut += sum(n for name, n in whole.items() if any(part in name for part in ("out.weight", "narrow.weight")))
    assert held == pytest.approx((sum(whole.values()) - cut) / 2 + cut / 4, abs=6)  # padding


@on_ranks(4)
def test_casts_are_followed() -> None:
    mesh = mesh_of(2, 2)
    model = gpt(over_data(mesh), mesh=mesh)
    model(tokens()).sum().backward()
    model.double()
    torch.testing.assert_close(model(tokens()), gpt().double()(tokens()))
    assert _query(model).weight.dtype == torch.float64
