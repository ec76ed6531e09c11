"""Optimizers in checkpoints: what is written of them, in any form of the parameters, and what cannot be.

That training goes on as if it had not stopped is in test_checkpoint_resume.py.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, get_fsdp_instances, optim_utils
from tests.checkpoint.test_resume import FORMS
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.forms import sharded
from tests.helpers.models import nested_mlp, scaled_layers
from tests.helpers.offload import with_folder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import grouped_adamw, train
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import Alone, adam, fully_sharded
from tests.helpers.ranks import RankPool


@parametrize_cases(saved=FORMS, loaded=FORMS, loaded_by=[2, 1])
def test_every_form_of_parameters_loads_the_state_of_every_other(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(3).run(_save_adam, tmp_path, case.saved)
    ranks(case.loaded_by).run(_save_adam, tmp_path, case.loaded, is_loaded=True)
    first, second = (load_file(tmp_path / name / "optimizer.safetensors") for name in ("run", "again"))
    assert_same_state(dict(sorted(second.items())), dict(sorted(first.items())))


def _save_adam(folder: Path, options: dict[str, Any], is_loaded: bool = False) -> None:
    model = nested_mlp(fully_sharded(**with_folder(options, folder / "offload")))
    optimizer = adam(model.parameters())
    if is_loaded:
        fsdp.load(folder / "run", model, optimizer)
    else:
        train(model, optimizer, range(2))
    fsdp.save(folder / ("again" if is_loaded else "run"), model, optimizer)


@parametrize_cases(at_most=5, saved=FORMS, loaded=FORMS, loaded_by=[1, 3])
def test_several_optimizers_are_saved_as_one(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(2).run(_save_two, tmp_path, case.saved)
    ranks(case.loaded_by).run(_save_two, tmp_path, case.loaded, is_loaded=True)
    first, second = (load_file(tmp_path / name / "optimizer.safetensors") for name in ("run", "again"))
    assert {name.rpartition("/")[2] for name in first} == {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert_same_state(dict(sorted(second.items())), dict(sorted(first.items())))


def _save_two(folder: Path, options: dict[str, Any], is_loaded: bool = False) -> None:
    model = nested_mlp(fully_sharded(**with_folder(options, folder / "offload")))
    inner = list(get_fsdp_instances(model)[1].parameters())
    first = torch.optim.SGD(inner, lr=0.1, momentum=0.5)
    second = adam([param for param in model.parameters() if all(param is not each for each in inner)])
    if is_loaded:
        first.param_groups[0]["lr"] = 7.0
        fsdp.load(folder / "run", model, [first, second])
        assert first.param_groups[0]["lr"] == 0.1
    else:
        train(model, first, range(1))
        train(model, second, range(1))
    fsdp.save(folder / ("again" if is_loaded else "run"), model, [first, second])


@on_ranks(2)
def test_a_list_of_optimizers_is_looked_through(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    with pytest.raises(ValueError, match="list of optimizers is empty"):
        fsdp.save(tmp_path / "run", model, [])
    with pytest.raises(TypeError, match="number 1 in the list of optimizers is not an optimizer: 'adam'"):
        fsdp.save(tmp_path / "run", model, [optimizer, "adam"])
    with pytest.raises(ValueError, match="in two of the optimizers, the second one number 1"):
        fsdp.save(tmp_path / "run", model, [optimizer, adam(model.parameters())])
    train(model, optimizer, range(1))
    fsdp.save(tmp_path / "run", model, [optimizer])
    fsdp.load(tmp_path / "run", model, optimizer)  # one in a list is one


def test_the_tensors_are_those_of_an_unsharded_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_adam, tmp_path, {})
    found = load_file(tmp_path / "run" / "optimizer.safetensors")
    model = nested_mlp()
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2), alone=True)
    expected = {
        f"{name}/{key}": value
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
        if key != "step"
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
    loaded = adam(model.parameters())
    fsdp.load(tmp_path / "run", model, loaded)
    assert all(int(state["step"]) == 2 for state in loaded.state.values())


@on_ranks(2)
def test_settings_of_groups_come_back_as_they_were(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True))
    optimizer = grouped_adamw(model)
    train(model, optimizer, range(1))
    optimizer.param_groups[1]["mine"] = {"names": ("a", "b")}
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    fsdp.save(tmp_path / "run", model, optimizer)
    other = torch.optim.AdamW([{"params": group["params"], "lr": 5.0} for group in optimizer.param_groups])
    fsdp.load(tmp_path / "run", model, other)
    assert [{key: value for key, value in group.items() if key != "params"} for group in other.param_groups] == before


@on_ranks(2)
def test_a_number_of_a_parameter_without_dimensions_is_recognized_by_other_parameters(tmp_path: Path) -> None:
    """Its shape is that of the parameter, and torch's optimizers do not have this key."""
    plain: Any = scaled_layers()
    plain.scale = nn.Parameter(torch.tensor(1.5))
    models = [sharded(copy.deepcopy(plain), form) for form in ("rows", "orig", "flat")]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    models[0](torch.ones(4, 5)).sum().backward()
    optimizers[0].step()
    for state in optimizers[0].state.values():
        state["visits"] = torch.tensor(3.0)
    fsdp.save(tmp_path / "run", models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        fsdp.load(tmp_path / "run", model, optimizer)
        assert all(state["visits"].shape == () and state["visits"] == 3 for state in optimizer.state.values())


@on_ranks(2)
def test_an_optimizer_is_loaded_without_the_weights(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer, other = adam(model.parameters()), adam(model.parameters())
    train(model, optimizer, range(1))
    fsdp.save(tmp_path / "run", model, optimizer)
    state = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    train(model, optimizer, range(1, 2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="no optimizer was given: pass the optimizer"):
        fsdp.load(tmp_path / "run", model, weights=False)
    fsdp.load(tmp_path / "run", model, other, weights=False)
    assert_same_state(model.state_dict(), weights)
    assert_same(optim_utils.full_optim_state_dict(model, other, recipient_rank=None), state)


@pytest.mark.parametrize("by", ["files", "names"])
@on_ranks(2)
def test_a_group_without_parameters_has_its_settings(tmp_path: Path, by: str) -> None:
    """As of a rule that finds no parameters for it; a scheduler reads and sets its learning rate too."""

    def of(model: FullyShardedDataParallel, unused: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [], "lr": unused}, {"params": [*model.parameters()], "lr": 0.1}])

    model = nested_mlp(fully_sharded(use_orig_params=True))
    optimizer, other = of(model, 0.2), of(model, 0.3)
    train(model, optimizer, range(1))
    if by == "files":
        fsdp.save(tmp_path / "run", model, optimizer)
        fsdp.load(tmp_path / "run", model, other)
    else:
        full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
        optim_utils.load_full_optim_state_dict(model, other, full)
    before, after = ([group | {"params": []} for group in each.param_groups] for each in (optimizer, other))
    assert after == before
    # It keeps its own, where the saved one has parameters.
    moved = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "lr": 0.4}])
    optim_utils.load_full_optim_state_dict(model, moved, optim_utils.full_optim_state_dict(model, optimizer, None))
    assert [group["lr"] for group in moved.param_groups] == [0.1, 0.4]


@on_ranks(2)
def test_loading_into_state_that_is_there_takes_no_memory(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(nn.Linear(2048, 2048, bias=False))
    optimizer = adam(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        fsdp.save(tmp_path / "run", model, optimizer)
        fsdp.load(tmp_path / "run", model, optimizer)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) <= 1 << 20


@on_ranks(2)
def test_an_optimizer_that_was_never_stepped_is_saved_and_loaded(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    fsdp.save(tmp_path / "run", model, adam(model.parameters()))
    optimizer = adam(model.parameters())
    fsdp.load(tmp_path / "run", model, optimizer)
    assert not optimizer.state
    train(model, optimizer, range(1))


class Wide(torch.optim.Optimizer):
    """Keeps sums in float64, a number and a list for each parameter, and whatever `odd` says."""

    def __init__(self, params: Any, odd: Any = None) -> None:
        super().__init__(params, {})
        self._odd = odd

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["sum"] = torch.arange(param.numel(), dtype=torch.float64).view(param.shape)
                state["count"], state["list"] = torch.tensor(3, dtype=torch.int32), [1, (2, None)]
                if self._odd is not None:
                    state["odd"] = self._odd


@on_ranks(2)
def test_state_of_another_dtype_stays_as_it_is(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = Wide(model.parameters())
    optimizer.step()
    fsdp.save(tmp_path / "run", model, optimizer)
    loaded = Wide(model.parameters())
    fsdp.load(tmp_path / "run", model, loaded)
    for param, state in optimizer.state.items():
        found = loaded.state[param]
        held = sum(interval.numel for interval in param.make_layout(2).intervals(dist.get_rank()))
        assert found["sum"].dtype is torch.float64
        assert torch.equal(found["sum"][:held], state["sum"][:held])
        assert (found["count"].dtype, found["count"], found["list"]) == (torch.int32, 3, [1, (2, None)])


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
@on_ranks(2)
def test_numbers_beside_16_bit_parameters_keep_all_of_their_digits(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    model = nested_mlp(fully_sharded()).bfloat16()
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    fsdp.save(tmp_path / "run", model, optimizer)
    loaded = kind(model.parameters(), lr=0.01)
    fsdp.load(tmp_path / "run", model, loaded)
    assert_same(loaded.state_dict(), optimizer.state_dict())


# What cannot be


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        (torch.zeros(2, 2), ValueError, r"state 'odd' of \S+ .*has shape \(2, 2\), and this rank's shard of it \("),
        (object(), TypeError, r"state 'odd' of \S+ .*is a builtins.object"),
    ],
)
def test_state_of_another_shape_is_refused_and_named(
    tmp_path: Path, odd: Any, error: type[Exception], message: str
) -> None:
    model = nested_mlp(fully_sharded(process_group=Alone()))
    optimizer = Wide(model.parameters(), odd)
    optimizer.step()
    with pytest.raises(error, match=message):
        fsdp.save(tmp_path / "run", model, optimizer)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_other_state_of_unsharded_parameters_is_saved_by_itself(tmp_path: Path) -> None:
    plain: Any = nested_mlp()
    free = list(plain.exit.parameters())
    model = FullyShardedDataParallel(plain, ignored_parameters=free)
    lbfgs, others = torch.optim.LBFGS(free), adam([param for param in model.parameters() if param not in set(free)])
    loss = model(torch.ones(2, 5)).sum()
    loss.backward()
    lbfgs.step(lambda: loss)
    others.step()
    with pytest.raises(ValueError, match="step them with a separate optimizer, and save its state_dict"):
        fsdp.save(tmp_path / "run", model, [lbfgs, others])
    fsdp.save(tmp_path / "run", model, others)
    fsdp.load(tmp_path / "run", model, others)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead of `pytorch_optimizer`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state = inner, defaultdict(dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.state, "inner": self.inner.state_dict()}


@on_ranks(2)
def test_an_optimizer_with_state_in_another_one_is_refused(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = Around(torch.optim.Adam(model.parameters()))
    with pytest.raises(TypeError, match=r"Around.state_dict\(\) has slow, inner instead of state and param_groups"):
        fsdp.save(tmp_path / "run", model, optimizer)
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(process_group=Alone()))
    other = adam(nested_mlp().parameters())
    with pytest.raises(ValueError, match=r"Adam: parameter 0 of group 0, of shape \(\), is not of this model"):
        fsdp.save(tmp_path / "run", model, other)
    fsdp.save(tmp_path / "run", model)
    with pytest.raises(ValueError, match="contains no optimizer: load it without an optimizer"):
        fsdp.load(tmp_path / "run", model, adam(model.parameters()))
    with pytest.raises(TypeError, match="an optimizer with param_groups"):
        fsdp.save(tmp_path / "run", model, object())


@on_ranks(2)
def test_what_does_not_fit_is_one_error_and_changes_nothing(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True), seed=1)
    params = dict(model.named_parameters())
    first, second, *rest = params.values()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second]}, {"params": rest[1:]}])
    train(model, optimizer, range(1))
    fsdp.save(tmp_path / "run", model, optimizer)
    model = nested_mlp(fully_sharded(use_orig_params=True))
    params = dict(model.named_parameters())
    other = adam(list(params.values())[:-1])
    with pytest.raises(RuntimeError) as caught:
        fsdp.load(tmp_path / "run", model, other)
    for text in (
        "in parameter groups 0 and 0, but that of the checkpoint has them in groups 0 and 1",
        "the optimizer has entry.bias in its parameter group 0, but that of the checkpoint does not",
        "the optimizer of the checkpoint has exit.bias, but this one does not",
    ):
        assert text in str(caught.value)
    assert not other.state
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


def _in_groups(model: Any, *sizes: int, rates: Sequence[float] = (0.1, 0.2, 0.3)) -> torch.optim.Optimizer:
    """Adam with the parameters divided into groups of these sizes; a negative one counts from the end."""
    params, groups = list(model.parameters()), []
    for size in sizes:
        taken = params[:size] if size > 0 else params[size:]
        params = [param for param in params if all(param is not other for other in taken)]
        groups.append({"params": taken})
    groups.append({"params": params})
    return torch.optim.Adam([{**group, "lr": rate} for group, rate in zip(groups, rates, strict=False)])


def _two_layers() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return FullyShardedDataParallel(layers, use_orig_params=True)


REGROUPED = [
    ((), (1,), "in parameter groups 0 and 1, but {} has them in groups 0 and 0"),
    ((1,), (1, 2), "in parameter groups 1 and 2, but {} has them in groups 1 and 1"),
    ((2,), (1, -2), "in parameter groups 1 and 2, but {} has them in groups 1 and 0"),
    ((1,), (), "in parameter groups 0 and 0, but {} has them in groups 0 and 1"),
    ((1,), (2,), "in parameter groups 0 and 0, but {} has them in groups 0 and 1"),
    ((-1,), (3,), "but {} has them in groups 1 and 0: create it with the same groups in the same order"),
]


@on_ranks(2)
def test_groups_that_were_divided_merged_or_moved_are_refused(tmp_path: Path) -> None:
    for saved, loaded, message in REGROUPED:
        _refuse_groups(tmp_path, saved, loaded, message)


def _refuse_groups(tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...], message: str) -> None:
    model = _two_layers()
    optimizer = _in_groups(model, *saved)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    fsdp.save(tmp_path / "run", model, optimizer)
    rates = (0.7, 0.8, 0.9)
    model = _two_layers()
    other = _in_groups(model, *loaded, rates=rates)
    with pytest.raises(RuntimeError, match=message.format("that of the checkpoint")):
        fsdp.load(tmp_path / "run", model, other)
    assert [group["lr"] for group in other.param_groups] == [*rates[: len(other.param_groups)]]
    assert not other.state
    same = _in_groups(model, *saved, rates=rates)
    fsdp.load(tmp_path / "run", model, same)
    assert [group["lr"] for group in same.param_groups] == [0.1, 0.2, 0.3][: len(same.param_groups)]
    full = optim_utils.full_optim_state_dict(model, same, recipient_rank=None)
    with pytest.raises(ValueError, match=message.format("the optimizer state")):
        optim_utils.shard_full_optim_state_dict(model, full, other)  # type: ignore[arg-type]


def test_an_optimizer_of_another_kind_is_refused_with_the_settings_that_differ(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(process_group=Alone()))
    fsdp.save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        RuntimeError, match=r"is SGD, with settings .*momentum.*, but that of the checkpoint is AdamW, .*betas"
    ):
        fsdp.load(tmp_path / "run", model, sgd)
    assert sgd.param_groups[0]["momentum"] == 0.9
    fsdp.load(tmp_path / "run", model, type("Mine", (torch.optim.AdamW,), {})(model.parameters()))


@on_ranks(2)
def test_state_of_single_parameters_does_not_fit_a_flat_one(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True), seed=1)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(1))
    for name, param in model.named_parameters():
        if name.endswith("entry.bias"):
            del optimizer.state[param]
    fsdp.save(tmp_path / "run", model, optimizer)
    flat = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError, match=r"that of entry.bias no 'exp_avg', .*; the two are in one flat parameter"):
        fsdp.load(tmp_path / "run", flat, adam(flat.parameters()))


@on_ranks(2)
def test_ranks_with_different_states_are_told(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    train(model, optimizer, range(1))
    if dist.get_rank() == 1:
        optimizer.state.clear()
    with pytest.raises(ValueError, match=r"the optimizer's state of .* on rank 0 and no 'exp_avg', .* on rank 1"):
        fsdp.save(tmp_path / "run", model, optimizer)


class Transposed(nn.Module):
    """A parameter with other strides than a contiguous one, as after ``to(memory_format=torch.channels_last)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3).t())
        self.out = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs @ self.weight)


def _as_it_is(model: Transposed) -> nn.Module:
    return model


def _ignoring(model: Transposed) -> nn.Module:
    return FullyShardedDataParallel(model, ignored_parameters=[model.weight])


def _by_files(folder: Path, model: nn.Module, optimizer: Any, other: nn.Module, second: Any) -> None:
    fsdp.save(folder / "run", model, optimizer)
    fsdp.load(folder / "run", other, second)


def _by_full_state(folder: Path, model: nn.Module, optimizer: Any, other: nn.Module, second: Any) -> None:
    other.load_state_dict(model.state_dict())
    full = optim_utils.full_optim_state_dict(model, optimizer)
    optim_utils.load_full_optim_state_dict(other, second, full, rank0_only=True)


@pytest.mark.parametrize(
    ("wrap", "load"), [(_as_it_is, _by_files), (_ignoring, _by_files), (_ignoring, _by_full_state)]
)
@on_ranks(2)
def test_state_has_the_strides_of_its_parameter_which_fused_optimizers_presume(
    tmp_path: Path, wrap: Callable[[Any], nn.Module], load: Callable[..., None]
) -> None:
    models = [wrap(Transposed()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.arange(6.0).reshape(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(models[0], optimizers[0])
    load(tmp_path, models[0], optimizers[0], models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    assert_same(models[1].state_dict(), models[0].state_dict())


class Odd(torch.optim.Optimizer):
    """Keeps vectors whose elements are not next to each other in memory, or are stored negated."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "strided": torch.arange(6.0)[::2],
                "expanded": torch.ones(1).expand(3),
                "negated": torch.full((3,), complex(0, 2)).conj().imag,
            }


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_owners_may_have_state_that_is_not_contiguous(tmp_path: Path, form: str) -> None:
    model = sharded(nn.Linear(4, 4, bias=False), form)
    optimizer = fsdp.OwnedOptimizer(model, [{"params": [*model.parameters()], "optimizer": Odd}])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = fsdp.fingerprint(model, optimizer)
    fsdp.save(tmp_path / "run", model, optimizer)
    found = load_file(tmp_path / "run" / "optimizer.safetensors")
    expected = {"strided": [0.0, 2.0, 4.0], "expanded": [1.0] * 3, "negated": [-2.0] * 3}
    assert {name.rpartition("/")[2]: value.tolist() for name, value in found.items()} == expected
    fsdp.load(tmp_path / "run", model, optimizer)
    assert fsdp.fingerprint(model, optimizer) == before
