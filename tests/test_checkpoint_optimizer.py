"""Optimizers in checkpoints: training goes on at any other number of ranks as if it had not stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from tests._ranks import RankPool
from tests.models import Wrap, keep, nested_mlp, tiny_transformer
from tests.pairs import parametrize_pairs
from tests.saving import counted_writes
from tests.stored import assert_equal_states, counted_reads
from tests.support import REGRESSION, TOKENS, Task, adam, adamw, fully_sharded, sgd_with_momentum

Make = Callable[[nn.Module], torch.optim.Optimizer]
WORLDS = [1, 2, 3, 4]
ROWS = 12  # of a batch, which every number of ranks divides


def of_all(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Make:
    return lambda model: make(model.parameters())


def grouped_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Without decay for what has one dimension; needs original parameters."""
    plain = dict(nested_mlp().named_parameters())
    flat = [[], []]  # type: ignore[var-annotated]
    for name, param in model.named_parameters():
        flat[plain[name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")].dim() < 2].append(param)
    return torch.optim.AdamW(
        [{"params": flat[0], "lr": 1e-2}, {"params": flat[1], "weight_decay": 0.0, "betas": (0.8, 0.9)}]
    )


def frozen_mlp(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    """`nested_mlp` of which a part is frozen."""

    def freeze(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Linear):  # the gate
            module.requires_grad_(False)
        return wrap(module)

    return nested_mlp(freeze, seed=seed)


class WithUnused(nn.Module):
    """A unit that no forward uses, and a parameter in 16 bits."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.used = wrap(nn.Linear(5, 3))
        self.unused = wrap(nn.Linear(3, 3))
        self.thin = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.out = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.used(inputs) * self.thin.float())


def with_unused(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(WithUnused(wrap))


tied_transformer = partial(tiny_transformer, tied=True)
adadelta = partial(torch.optim.Adadelta, lr=0.5)

CASES: dict[str, tuple[Any, Any, Task, dict[str, Any]]] = {
    "adam": (nested_mlp, of_all(adam), REGRESSION, {}),
    "adam, original parameters": (nested_mlp, of_all(adam), REGRESSION, {"use_orig_params": True}),
    "adamw in groups": (nested_mlp, grouped_adamw, REGRESSION, {"use_orig_params": True}),
    "adamw, one by one": (nested_mlp, of_all(adamw), REGRESSION, {"flatten_parameters": False}),
    "momentum": (nested_mlp, of_all(sgd_with_momentum), REGRESSION, {}),
    "adadelta": (nested_mlp, of_all(adadelta), REGRESSION, {}),
    "frozen": (frozen_mlp, of_all(adam), REGRESSION, {}),
    "unused, mixed dtypes": (with_unused, of_all(adam), REGRESSION, {}),
    "tied": (tied_transformer, of_all(adam), TOKENS, {}),
    "on disk": (nested_mlp, of_all(adam), REGRESSION, {"offload": "disk", "offload_folder": "offload"}),
}


def train(case: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """On this rank's part of batches that are the same for every number of ranks."""
    task = CASES[case][2]
    for step in steps:
        inputs, targets = task.batch(torch.Generator().manual_seed(step), ROWS)
        rank, size = dist.get_rank(), dist.get_world_size()
        optimizer.zero_grad()
        task.loss(model(inputs.chunk(size)[rank]), targets.chunk(size)[rank]).backward()
        optimizer.step()


def made(case: str, folder: Path, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    make, make_optimizer, _, options = CASES[case]
    options = {name: folder / value if name == "offload_folder" else value for name, value in options.items()}
    model = make(fully_sharded(**options), seed=seed)
    return model, make_optimizer(model)


def _train_and_save(case: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The states at the save, and two steps later."""
    model, optimizer = made(case, folder, seed=1)
    train(case, model, optimizer, range(2))
    fsdp.save(folder / "run", model, optimizer)
    saved = model.state_dict()
    train(case, model, optimizer, range(2, 4))
    return saved, model.state_dict()


def _load_and_train(case: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = made(case, folder, seed=2)
    for group in optimizer.param_groups:
        group["lr"] = 77.0  # comes with the checkpoint
    fsdp.load(folder / "run", model, optimizer)
    loaded = model.state_dict()
    train(case, model, optimizer, range(2, 4))
    return loaded, model.state_dict()


@parametrize_pairs(saved_by=WORLDS, more=[1, 2, 3, 0], case=list(CASES))
def test_training_goes_on_at_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, saved_by: int, more: int, case: str
) -> None:
    loaded_by = (saved_by - 1 + more) % 4 + 1
    saved, trained = ranks(saved_by).run(_train_and_save, case, tmp_path)[0]
    loaded, went_on = ranks(loaded_by).run(_load_and_train, case, tmp_path)[0]
    assert_equal_states(loaded, saved)
    for name, value in trained.items():
        torch.testing.assert_close(went_on[name], value, rtol=2e-5, atol=2e-6)
    if saved_by == loaded_by:
        assert_equal_states(went_on, trained)


@pytest.mark.parametrize(("saved", "loaded"), [({}, {"use_orig_params": True}), ({"use_orig_params": True}, {})])
def test_flat_and_original_parameters_load_each_others_state(
    ranks: RankPool, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    ranks(3).run(_save_adam, tmp_path, saved)
    ranks(2).run(_save_adam, tmp_path, loaded, is_loaded=True)
    first, second = (load_file(tmp_path / name / "optimizer.safetensors") for name in ("run", "again"))
    assert_equal_states(dict(sorted(second.items())), dict(sorted(first.items())))


def _save_adam(folder: Path, options: dict[str, Any], is_loaded: bool = False) -> None:
    model = nested_mlp(fully_sharded(**options))
    optimizer = adam(model.parameters())
    if is_loaded:
        fsdp.load(folder / "run", model, optimizer)
    else:
        train("adam", model, optimizer, range(2))
    fsdp.save(folder / ("again" if is_loaded else "run"), model, optimizer)


def test_the_tensors_are_those_of_an_unsharded_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_adam, tmp_path, {})
    found = load_file(tmp_path / "run" / "optimizer.safetensors")
    model = nested_mlp()
    optimizer = adam(model.parameters())
    for step in range(2):
        inputs, targets = REGRESSION.batch(torch.Generator().manual_seed(step), ROWS)
        optimizer.zero_grad()
        REGRESSION.loss(model(inputs), targets).backward()
        optimizer.step()
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


def test_settings_of_groups_come_back_as_they_were(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_and_load_groups, tmp_path)


def _save_and_load_groups(folder: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True))
    optimizer = grouped_adamw(model)
    train("adam", model, optimizer, range(1))
    optimizer.param_groups[1]["mine"] = {"names": ("a", "b")}
    before = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    fsdp.save(folder / "run", model, optimizer)
    other = torch.optim.AdamW([{"params": group["params"], "lr": 5.0} for group in optimizer.param_groups])
    fsdp.load(folder / "run", model, other)
    assert [{key: value for key, value in group.items() if key != "params"} for group in other.param_groups] == before


def test_every_byte_is_written_and_read_once(ranks: RankPool, tmp_path: Path) -> None:
    counts = ranks(3).run(_count, tmp_path)
    total = 3 * sum(value.nbytes for value in nested_mlp().state_dict().values())
    assert sum(written for written, _ in counts) == sum(read for _, read in counts) == total


def _count(folder: Path) -> tuple[int, int]:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    train("adam", model, optimizer, range(1))
    with counted_writes() as written:
        fsdp.save(folder / "run", model, optimizer)
    with counted_reads() as read:
        fsdp.load(folder / "run", model, optimizer)
    return sum(written), sum(read)


def test_loading_into_state_that_is_there_takes_no_memory(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_and_load_large, tmp_path)


def _save_and_load_large(folder: Path) -> None:
    model = FullyShardedDataParallel(nn.Linear(2048, 2048, bias=False))
    optimizer = adam(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    with torch.profiler.profile(profile_memory=True) as profile:
        fsdp.save(folder / "run", model, optimizer)
        fsdp.load(folder / "run", model, optimizer)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) <= 1 << 20


def test_an_optimizer_that_was_never_stepped_is_saved_and_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_unstepped, tmp_path)


def _save_unstepped(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    fsdp.save(folder / "run", model, adam(model.parameters()))
    optimizer = adam(model.parameters())
    fsdp.load(folder / "run", model, optimizer)
    assert not optimizer.state
    train("adam", model, optimizer, range(1))


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


def test_state_of_another_dtype_stays_as_it_is(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_wide, tmp_path)


def _save_wide(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = Wide(model.parameters())
    optimizer.step()
    fsdp.save(folder / "run", model, optimizer)
    loaded = Wide(model.parameters())
    fsdp.load(folder / "run", model, loaded)
    for param, state in optimizer.state.items():
        found = loaded.state[param]
        held = sum(interval.numel for interval in param.make_layout(2).intervals(dist.get_rank()))
        assert found["sum"].dtype is torch.float64
        assert torch.equal(found["sum"][:held], state["sum"][:held])
        assert (int(found["count"]), found["list"]) == (3, [1, (2, None)])


# What cannot be


@pytest.mark.parametrize(
    ("odd", "error", "message"),
    [
        (torch.zeros(2, 2), ValueError, r"state 'odd' of \S+ .*has shape \[2, 2\], and this rank's part of it \["),
        (object(), TypeError, r"state 'odd' of \S+ .*is a builtins.object"),
    ],
)
def test_state_of_another_shape_is_refused_and_named(
    ranks: RankPool, tmp_path: Path, odd: Any, error: type[Exception], message: str
) -> None:
    model = nested_mlp(fully_sharded(process_group=_alone()))
    optimizer = Wide(model.parameters(), odd)
    optimizer.step()
    with pytest.raises(error, match=message):
        fsdp.save(tmp_path / "run", model, optimizer)
    assert not list(tmp_path.iterdir())


def _alone() -> Any:
    from tests.support import Alone

    return Alone()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(process_group=_alone()))
    other = adam(nested_mlp().parameters())
    with pytest.raises(ValueError, match=r"Adam: parameter 0 of group 0, of shape \[\], is not of this model"):
        fsdp.save(tmp_path / "run", model, other)
    fsdp.save(tmp_path / "run", model)
    with pytest.raises(ValueError, match="has no optimizer in it: load it without one"):
        fsdp.load(tmp_path / "run", model, adam(model.parameters()))
    with pytest.raises(TypeError, match="an optimizer with param_groups"):
        fsdp.save(tmp_path / "run", model, object())


def test_what_does_not_fit_is_one_error_and_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_and_refuse, tmp_path)


def _save_and_refuse(folder: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True), seed=1)
    params = dict(model.named_parameters())
    first, second, *rest = params.values()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [second]}, {"params": rest[1:]}])
    train("adam", model, optimizer, range(1))
    fsdp.save(folder / "run", model, optimizer)
    model = nested_mlp(fully_sharded(use_orig_params=True))
    params = dict(model.named_parameters())
    other = adam(list(params.values())[:-1])
    with pytest.raises(RuntimeError) as caught:
        fsdp.load(folder / "run", model, other)
    for text in (
        "in one parameter group (0), and that of the checkpoint has them in groups 0 and 1",
        "the optimizer has entry.bias, and that of the checkpoint has not",
        "the optimizer of the checkpoint has exit.bias, and this one has not",
    ):
        assert text in str(caught.value)
    assert not other.state
    assert_equal_states(model.state_dict(), nested_mlp().state_dict())


def test_state_of_single_parameters_does_not_fit_a_flat_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_single_and_load_flat, tmp_path)


def _save_single_and_load_flat(folder: Path) -> None:
    model = nested_mlp(fully_sharded(use_orig_params=True), seed=1)
    optimizer = adam(model.parameters())
    train("adam", model, optimizer, range(1))
    for name, param in model.named_parameters():
        if name.endswith("entry.bias"):
            del optimizer.state[param]
    fsdp.save(folder / "run", model, optimizer)
    flat = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError, match=r"that of entry.bias nothing: the two are in one flat parameter"):
        fsdp.load(folder / "run", flat, adam(flat.parameters()))


def test_ranks_with_different_states_are_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_different_states, tmp_path)


def _save_different_states(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    train("adam", model, optimizer, range(1))
    if dist.get_rank() == 1:
        optimizer.state.clear()
    with pytest.raises(ValueError, match=r"the optimizer's state of .* on rank 0 and nothing on rank 1"):
        fsdp.save(folder / "run", model, optimizer)
