"""The state of modules under `fully_shard`: plain names, `DTensor`s, and everything that reads and writes them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import fsdp
from tests.helpers.dtensor_twins import (
    assert_at_rest,
    assert_states_within,
    conv_net,
    local,
    ours,
    torchs,
    uneven,
    whole,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Net, Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adamw
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


def trained(wrap: Wrap, steps: int = 2, make: Any = uneven) -> tuple[Any, torch.optim.Optimizer]:
    """Collective. A model and its optimizer after some steps."""
    model = make(wrap)
    optimizer = adamw(model.parameters())
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        once(model, INPUTS * (step + 1))
        optimizer.step()
        optimizer.zero_grad()


def fresh(wrap: Wrap) -> tuple[Any, torch.optim.Optimizer]:
    """A model with other values, and its optimizer."""
    model = uneven(wrap, seed=9)
    return model, adamw(model.parameters())


def assert_goes_on_alike(one: tuple[Any, Any], other: tuple[Any, Any], tolerance: float | None = None) -> None:
    """Collective. Further steps leave the same state."""
    for model, optimizer in (one, other):
        go_on(model, optimizer)
    assert_states_within(full_state(one[0]), full_state(other[0]), tolerance)


# state_dict


@on_ranks(2)
def test_state_dicts_have_plain_names_and_dtensors() -> None:
    model, plain = conv_net(ours()), conv_net()
    state, expected = model.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    params = dict(model.named_parameters())
    assert list(params) == [name for name, _ in plain.named_parameters()]
    for name, value in state.items():
        assert isinstance(value, DTensor) is (name in params), name
        assert value.shape == expected[name].shape
        assert name not in params or local(value).data_ptr() == local(params[name]).data_ptr()
    assert_same_state(full_state(model), expected)


@parametrize_pairs(world_size=[1, 2], assign=[False, True], form=["dtensors", "whole", "whole_float64"])
@on_ranks("world_size")
def test_loading_a_state_dict(form: str, assign: bool) -> None:
    if form == "whole_float64" and assign:
        pytest.skip("a parameter that is assigned has the dtype of the value")
    source, _ = trained(ours())
    state = source.state_dict() if form == "dtensors" else full_state(source)
    if form == "whole_float64":
        state = {name: value.double() for name, value in state.items()}
    model, optimizer = fresh(ours())
    result = model.load_state_dict(state, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(full_state(model), full_state(source))
    before = full_state(source)
    go_on(model, optimizer)
    go_on(model, adamw(model.parameters()))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in full_state(model).items())
    assert_same_state(full_state(source), before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2)
def test_optimizers_find_what_was_assigned(device: str) -> None:
    # As by `transformers`, which shards a model and assigns each parameter as it reads it.
    values = {name: value.detach() for name, value in uneven(ours(), seed=9).state_dict().items()}
    found: list[dict[str, Tensor]] = []
    for wrap in (torchs, ours):
        with torch.device(device):
            model = uneven(wrap())
        for name, value in values.items():
            where, _, key = name.rpartition(".")
            setattr(model.get_submodule(where), key, nn.Parameter(value.clone()))
        optimizer = adamw(model.parameters())
        go_on(model, optimizer)
        found.append({name: local(value).clone() for name, value in model.state_dict().items()})
    assert_states_within(found[1], found[0], None)
    assert any(not torch.equal(value, local(values[name])) for name, value in found[1].items())


@on_ranks(2)
def test_optimizers_find_what_was_assigned_after_a_backward_that_failed() -> None:
    model, value = uneven(ours()), nn.Parameter(torch.full_like(full_state(uneven(ours()))["gate.weight"], 0.5))

    def fail(_: Tensor) -> None:
        raise KeyError("on purpose")

    inputs = INPUTS.clone().requires_grad_()
    inputs.register_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        model(inputs).sum().backward()
    model.gate.weight = value
    assert torch.equal(full_state(model)["gate.weight"], value)
    optimizer = adamw(model.parameters())
    go_on(model, optimizer)
    assert not torch.equal(full_state(model)["gate.weight"], value)


@on_ranks(2)
def test_loading_with_keys_that_are_missing_or_too_many() -> None:
    model, other = uneven(ours()), full_state(uneven(ours(), seed=9))
    before = full_state(model)
    state = {name: value for name, value in other.items() if name != "gate.weight"} | {"more": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r'Missing key.*"gate.weight"[^$]*Unexpected key.*"more"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["gate.weight"], ["more"])
    assert_same_state(full_state(model), {**other, "gate.weight": before["gate.weight"]})


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_loading_other_shapes(assign: bool) -> None:
    model = uneven(ours())
    state = {**full_state(model), "gate.weight": torch.ones(4, 3)}
    with pytest.raises(RuntimeError, match=r"gate.weight"):
        model.load_state_dict(state, assign=assign)
    model(INPUTS)


# Cut along another dimension


@on_ranks(3)
def test_states_of_what_is_cut_along_another_dimension(tmp_path: Path) -> None:
    source, optimizer = trained(ours(shard_placement_fn=last_dim))
    for state in (full_state(source), source.state_dict(), uneven(ours()).state_dict()):
        model, _ = fresh(ours(shard_placement_fn=last_dim))
        model.load_state_dict(state)
        assert_same_state(full_state(model), {name: whole(value) for name, value in state.items()})
    assert_same_state(full_state(copy.deepcopy(source)), full_state(source))
    dcp.save(_states(source, optimizer), checkpoint_id=tmp_path)
    other, other_optimizer = fresh(ours())
    states = _states(other, other_optimizer)
    dcp.load(states, checkpoint_id=tmp_path)
    set_model_state_dict(other, states["model"])
    set_optimizer_state_dict(other, other_optimizer, states["optimizer"])
    assert_goes_on_alike((other, other_optimizer), (source, optimizer), 1e-5)
    fsdp.save(tmp_path / "saved", source, optimizer)
    for wrap in (ours(), ours(shard_placement_fn=last_dim)):
        other, other_optimizer = fresh(wrap)
        fsdp.load(tmp_path / "saved", other, other_optimizer)
        assert_same_state(full_state(other), full_state(source))


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


# torch.distributed.checkpoint


@parametrize_pairs(sizes=[(2, 2), (2, 3), (3, 1), (1, 2)], direction=["to_torchs", "from_torchs", "to_ours"])
def test_distributed_checkpoints_between_ours_and_torchs(
    ranks: RankPool, direction: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    wraps = {"to_torchs": (ours, torchs), "from_torchs": (torchs, ours), "to_ours": (ours, ours)}[direction]
    expected = ranks(sizes[0]).run(_save_distributed, wraps[0], tmp_path)[0]
    ranks(sizes[1]).run(_load_distributed, wraps[1], tmp_path, expected)


def _states(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save_distributed(wrap: Any, folder: Path) -> dict[str, Tensor]:
    """Returns what the model has become after further steps."""
    model, optimizer = trained(wrap())
    dcp.save(_states(model, optimizer), checkpoint_id=folder)
    go_on(model, optimizer)
    return full_state(model)


def _load_distributed(wrap: Any, folder: Path, expected: dict[str, Tensor]) -> None:
    model, optimizer = fresh(wrap())
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(model, states["model"])
    set_optimizer_state_dict(model, optimizer, states["optimizer"])
    go_on(model, optimizer)
    assert_states_within(full_state(model), expected, 1e-5)


# Whole states on the host are only on rank 0, so that the others need a broadcast.
@pytest.mark.parametrize(("cpu_offload", "broadcast"), [(False, False), (False, True), (True, True)])
@on_ranks(2)
def test_full_states_by_torchs_functions(cpu_offload: bool, broadcast: bool) -> None:
    source, optimizer = trained(ours())
    asked = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    state = get_model_state_dict(source, options=asked)
    optimizer_state = get_optimizer_state_dict(source, optimizer, options=asked)
    assert not any(isinstance(value, DTensor) for value in state.values())
    given = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    other, other_optimizer = fresh(ours())
    set_model_state_dict(other, state, options=given)
    # A copy, since torch's optimizers keep the count of steps that they are given, and would count together.
    set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(optimizer_state), options=given)
    assert_goes_on_alike((other, other_optimizer), (source, optimizer))


# fsdp.save, fsdp.load and fsdp.load_safetensors


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 1)], ids=str)
def test_our_checkpoints_at_other_world_sizes(ranks: RankPool, sizes: tuple[int, int], tmp_path: Path) -> None:
    expected = ranks(sizes[0]).run(_save, tmp_path / "saved")[0]
    ranks(sizes[1]).run(_load_saved, tmp_path / "saved", expected)


def _save(folder: Path) -> dict[str, Tensor]:
    model, optimizer = trained(ours())
    fsdp.save(folder, model, optimizer, generators=False)
    go_on(model, optimizer)
    return full_state(model)


def _load_saved(folder: Path, expected: dict[str, Tensor]) -> None:
    model, optimizer = fresh(ours())
    fsdp.load(folder, model, optimizer)
    go_on(model, optimizer)
    assert_states_within(full_state(model), expected, 1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_safetensors_files(ranks: RankPool, world_size: int, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(conv_net().state_dict(), tmp_path / "model.safetensors")
    ranks(world_size).run(_load_safetensors, tmp_path / "model.safetensors")


def _load_safetensors(path: Path) -> None:
    model, plain = conv_net(ours()), conv_net()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fsdp.load_safetensors(model, path)
    assert_same_state(full_state(model), plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(INPUTS), plain(INPUTS))


@on_ranks(2)
def test_a_state_dict_can_be_copied_and_saved_by_each_rank(tmp_path: Path) -> None:
    model, _ = trained(ours())
    path = tmp_path / f"rank{dist.get_rank()}.pt"
    expected = {name: local(value).clone() for name, value in model.state_dict().items()}
    torch.save(model.state_dict(), path)
    for kept in (copy.deepcopy(model.state_dict()), torch.load(path)):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert {type(value) for value in kept.values()} == {DTensor}
        assert_same_state({name: local(value) for name, value in kept.items()}, expected)
        model.load_state_dict(kept)
        assert_same_state({name: local(value) for name, value in model.state_dict().items()}, expected)
    # A file has this rank's rows, and not the whole shard for each parameter.
    held = sum(local(value).untyped_storage().nbytes() for value in kept.values())
    assert held == sum(value.nbytes for value in expected.values())


@on_ranks(2)
def test_state_that_another_rank_has_saved_for_itself_is_an_error(tmp_path: Path) -> None:
    model, optimizer = trained(ours(), make=even)
    before = full_state(model)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    weights, states = torch.load(tmp_path / f"rank{1 - dist.get_rank()}.pt", weights_only=False)
    ranks = rf"saved by rank {1 - dist.get_rank()}, but this is rank {dist.get_rank()}.*fsdp.save"
    with pytest.raises(RuntimeError, match=rf"0\.weight.*{ranks}"):
        model.load_state_dict(weights)
    with pytest.raises(RuntimeError, match=rf"exp_avg.*{ranks}"):
        optimizer.load_state_dict(states)
    assert_same_state(full_state(model), before)
    weights, states = torch.load(tmp_path / f"rank{dist.get_rank()}.pt", weights_only=False)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    go_on(model, optimizer)


def even(wrap: Wrap) -> nn.Module:
    """All ranks have equally many rows."""
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)))


def _through_pickles(state: dict[str, Any], _: Path) -> dict[str, Any]:
    return {name: pickle.loads(pickle.dumps(value)) for name, value in state.items()}


def _through_async_save(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.async_save(state, checkpoint_id=folder).result()  # type: ignore[union-attr]
    dcp.load(found, checkpoint_id=folder)
    return found


@pytest.mark.parametrize("through", [_through_pickles, _through_async_save])
@on_ranks(2)
def test_state_dicts_and_gradients_can_be_written_by_each_rank(through: Any, tmp_path: Path) -> None:
    model, _ = trained(ours())
    once(model, INPUTS)
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for number, state in enumerate((model.state_dict(), gradients)):
        folder = tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        found = through(state, folder)
        assert all(type(value) is DTensor for value in found.values())
        assert_same_state(*({name: local(value) for name, value in each.items()} for each in (found, state)))


def scaled() -> nn.Module:
    """With a parameter without dimensions."""
    return Net(lambda net, x: net.linear(x) * net.scale, scale=nn.Parameter(torch.tensor(1.5)), linear=nn.Linear(5, 3))


def _make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def _make_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _make_nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.1)  # which has numbers of other names


@parametrize_pairs(
    at_most=3, from_first=[False, True], make=[_make_adam, _make_momentum, _make_nadam], world_size=[2, 3]
)
@on_ranks("world_size")
def test_a_full_state_of_a_parameter_without_dimensions(from_first: bool, make: Any) -> None:
    def new() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = scaled()
        fsdp.fully_shard(model)
        return model, make(model)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(INPUTS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = new()
    train(model, optimizer)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    whole = StateDictOptions(full_state_dict=True)
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))  # it shares tensors
    train(model, optimizer)
    for is_new in (True, False):
        resumed, second = new()
        if not is_new:
            train(resumed, second)  # it has state already
        resumed.load_state_dict(weights)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        given = {} if from_first and dist.get_rank() else copy.deepcopy(full)
        set_optimizer_state_dict(resumed, second, given, options=options)
        assert_same_optimizer(second.state_dict(), state)
        train(resumed, second)
        for name, param in model.named_parameters():
            assert torch.equal(resumed.get_parameter(name).full_tensor(), param.full_tensor()), name  # type: ignore[operator]


def assert_same_optimizer(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Types, placements and values of two states."""
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            other = found["state"][number][key]
            assert isinstance(other, DTensor) is isinstance(value, DTensor), (number, key)
            assert getattr(other, "placements", None) == getattr(value, "placements", None)
            assert torch.equal(local(other), local(value))


class Interrupted(nn.Module):
    """Raises in the middle of its forward, or of a method, if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.is_interrupted = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.is_interrupted:
            raise KeyboardInterrupt
        return self.last(hidden)

    encode = forward


@pytest.mark.parametrize("method", ["__call__", "encode"])
@on_ranks(2)
def test_the_state_after_an_interrupted_forward_is_that_before(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Interrupted()
    fsdp.fully_shard(module.first)
    model: Any = fsdp.fully_shard(module)
    fsdp.register_fsdp_forward_method(model, "encode")
    once(model, INPUTS)
    before = {name: whole(value).clone() for name, value in model.state_dict().items()}
    uses = {
        "list": lambda: list(model.parameters()),
        "take": lambda: model.state_dict(),
        "load": lambda: model.load_state_dict({name: value + 1 for name, value in before.items()}),
        "save": lambda: fsdp.save(tmp_path / method, model),
    }
    for name, use in uses.items():
        model.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            getattr(model, method)(INPUTS)
        model.is_interrupted = False
        use()
        assert_at_rest(model)
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values()), name
        change = 1 if name == "load" else 0
        before = {key: value + change for key, value in before.items()}
        assert_states_within({key: whole(value) for key, value in state.items()}, before)
    once(model, INPUTS)


@on_ranks(2)
def test_an_interrupted_forward_leaves_what_has_accumulated() -> None:
    found = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        model: Any = fsdp.fully_shard(Interrupted())
        once(model, INPUTS)
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        once(model, INPUTS)
        model.set_requires_gradient_sync(True)
        model.is_interrupted = is_interrupted
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                model(INPUTS)
        model.is_interrupted = False
        once(model, -INPUTS)
        found.append({name: whole(param.grad) for name, param in model.named_parameters()})
    assert_states_within(*found)


@pytest.mark.parametrize("of", ["", "0"], ids=["unit", "module of a unit"])
@pytest.mark.parametrize("is_in_backward", [False, True])
@on_ranks(2)
def test_a_state_dict_of_modules_that_compute_is_an_error(of: str, is_in_backward: bool) -> None:
    """They list unsharded parameters, whose memory is freed when they have computed."""
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fsdp.fully_shard(model[1])
    fsdp.fully_shard(model)

    def take(*_: Any) -> None:
        model.get_submodule(of).state_dict()

    def take_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(take)

    hook = model[0].register_forward_hook(take_in_backward if is_in_backward else take)
    with pytest.raises(RuntimeError, match="cannot take a state dict in the middle of a forward or backward of root"):
        once(model, INPUTS)
    hook.remove()
    assert all(isinstance(value, DTensor) for value in model.get_submodule(of).state_dict().values())
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model.get_submodule(of).state_dict().values())
    idle: list[Tensor] = []
    model[0].register_forward_hook(lambda *_: idle.extend(model[1].state_dict().values()))
    once(model, INPUTS)
    assert [type(value) for value in idle] == [DTensor, DTensor]


@on_ranks(2)
def test_a_state_dict_of_a_tied_parameter_is_an_error_while_the_unit_around_computes() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    for module in (*model, model):
        fsdp.fully_shard(module)

    def take(*_: Any) -> None:
        model[2].state_dict()

    hook = model[1].register_forward_hook(take)
    with pytest.raises(RuntimeError, match="cannot take a state dict in the middle of a forward or backward of root"):
        once(model, INPUTS)
    hook.remove()
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model[2].state_dict().values())
