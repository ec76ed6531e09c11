"""`fsdp.accelerate.Accelerator`, by the recipes of docs/hugging_face.md: it trains as one process on all the data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

import fsdp
from fsdp import FSDPModule, FullyShardedDataParallel, ShardedGradScaler, fully_shard
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.hugging_face import (
    FORMS,
    MODULES,
    PATIENCE,
    TOKENS,
    as_launched,
    from_pretrained,
    logits,
    made,
    plain_of,
    recipe,
    rows,
    save_with_torchs_fsdp,
    sharded,
    whole_state,
)
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

pytestmark = needs("transformers", "accelerate")
PRELOAD = MODULES

ROWS, BATCH, TURNS = 24, 2, 2  # in the data set, in a rank's batch, and batches in a step


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def loader() -> Any:
    return torch.utils.data.DataLoader(rows(ROWS), batch_size=BATCH)  # type: ignore[arg-type]


def train_plain(model: Any) -> None:
    """What the recipe does, on the ranks' batches put together."""
    optimizer, size = optimizer_of(model), dist.get_world_size()
    scheduler = scheduler_of(optimizer)
    tokens = torch.stack([row["input_ids"] for row in rows(ROWS)])
    for batch in tokens.split(BATCH * TURNS * size):
        model(input_ids=batch, labels=batch).loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(size):  # accelerate has schedules count batches, of all ranks
            scheduler.step()


def prepared_parts(model: nn.Module) -> tuple[Any, ...]:
    optimizer = optimizer_of(model)
    return model, optimizer, scheduler_of(optimizer), loader()


# Training


@pytest.mark.parametrize(
    ("size", "family", "form"), [(2, "llama", "flat"), (3, "gpt2", "original"), (2, "llama", "fully_shard")]
)
@on_ranks("size", timeout=PATIENCE)
def test_the_recipe_trains_evaluates_and_exports(tmp_path: Path, family: str, form: str) -> None:
    from fsdp.accelerate import Accelerator

    code, model, plain = recipe("accelerated"), sharded(family, form), made(family)[0]
    with as_launched():
        accelerator = Accelerator(gradient_accumulation_steps=TURNS)
        assert code.train(accelerator, *prepared_parts(model), max_norm=0.2) is model
        train_plain(plain)
        assert_close_state(whole_state(model), plain.state_dict(), rtol=1e-4, atol=1e-6)
        data = torch.utils.data.DataLoader(rows(7, seed=1), batch_size=1)  # type: ignore[arg-type]
        found = code.evaluate(accelerator, model, data)
        code.export(accelerator, model, tmp_path)
        expected = logits(model)
    tokens = torch.stack([row["input_ids"] for row in rows(7, seed=1)])
    torch.testing.assert_close(found, plain.eval()(input_ids=tokens, labels=tokens).loss.detach())
    if dist.get_rank() == 0:
        assert torch.equal(logits(from_pretrained(family, tmp_path)), expected)


@on_ranks(2, timeout=PATIENCE)
def test_with_accelerates_own_accelerator_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    import accelerate

    model, plain = sharded("llama"), made("llama")[0]
    with as_launched():
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=TURNS)
        assert recipe("plain_accelerate").train(accelerator, *prepared_parts(model), folder, max_norm=0.2) is model
    train_plain(plain)
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-6)
    again = sharded("llama", seed=1)
    loaded = fsdp.load(folder, again, optimizer_of(again))
    assert loaded.values["last_epoch"] == 2 * ROWS // (BATCH * TURNS * 2)
    assert_same_state(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("form", [*FORMS, "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_batches_that_are_accumulated_are_not_reduced(form: str) -> None:
    from fsdp.accelerate import Accelerator

    batch = next(iter(loader()))
    with as_launched():
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = accelerator.prepare(sharded("llama", form))
        optimizer = optimizer_of(model)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
        with pytest.raises(RuntimeError, match="are not reduced"):
            optimizer.step()  # accelerate's own would have waited
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
        optimizer.step()


@on_ranks(2, timeout=PATIENCE)
def test_bf16_computes_under_autocast_and_a_plain_model_is_treated_as_ever() -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(mixed_precision="bf16")
        plain = accelerator.prepare(made("llama")[0])
        assert isinstance(plain, nn.parallel.DistributedDataParallel)
        expected = logits(plain)
        assert not torch.equal(expected, logits(made("llama")[0]))
        for form in (*FORMS, "fully_shard"):
            model = accelerator.prepare(sharded("llama", form))
            assert accelerator.prepare(model) is model  # and not cast twice
            found = logits(model)
            assert found.dtype is torch.float32
            assert torch.equal(found, expected)
            inside = accelerator.unwrap_model(model)
            assert torch.equal(logits(inside), expected)  # as `generate` computes
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            assert not torch.equal(logits(inside), expected)
        assert_same_state(accelerator.get_state_dict(plain), made("llama")[0].state_dict())


# Saving


@pytest.mark.parametrize(("form", "other"), [("flat", "original"), ("fully_shard", "flat")])
def test_a_state_is_loaded_by_another_number_of_ranks(ranks: RankPool, tmp_path: Path, form: str, other: str) -> None:
    saved = ranks(2, timeout=PATIENCE).run(_save_state, tmp_path / "run", form)[0]
    ranks(3, timeout=PATIENCE).run(_load_state, tmp_path / "run", other, saved)


def test_a_state_of_torchs_fsdp_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, timeout=PATIENCE).run(_save_state, tmp_path / "run", "original")[0]
    ranks(2, timeout=PATIENCE).run(_save_with_torchs_fsdp, tmp_path / "run")
    ranks(3, timeout=PATIENCE).run(_load_state, tmp_path / "run", "flat", saved)


def _save_with_torchs_fsdp(folder: Path) -> None:
    model = torchs_fully_shard(made("llama")[0])
    save_with_torchs_fsdp(folder, "SHARDED_STATE_DICT", model, optimizer_of(model))


def _save_state(folder: Path, form: str) -> dict[str, Any]:
    from fsdp.accelerate import Accelerator

    model = sharded("llama", form)
    with as_launched():
        accelerator = Accelerator()
        recipe("accelerated").train(accelerator, *prepared_parts(model))
        seen: list[nn.Module] = []

        def look(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            seen.extend(models)
            (Path(folder) / "note").touch()

        accelerator.register_save_state_pre_hook(look)
        for _ in range(2):  # the second replaces the first
            accelerator.save_state(folder)
            dist.barrier()
        assert seen == [model, model]
    assert not list(folder.glob("*optimizer*.bin"))  # of one rank's part
    assert not list(folder.glob("pytorch_model*"))
    return {name: value.clone() for name, value in whole_state(model).items()} | {
        "lr": accelerator._schedulers[0].get_lr()
    }


def _load_state(folder: Path, form: str, saved: dict[str, Any]) -> None:
    from fsdp.accelerate import Accelerator

    rate = saved.pop("lr")
    model = sharded("llama", form, seed=1)
    optimizer = optimizer_of(model)
    with as_launched():
        accelerator = Accelerator()
        accelerator.prepare(model, optimizer, scheduler_of(optimizer))
        accelerator.load_state(folder)
        assert accelerator._schedulers[0].get_lr() == rate
    assert_same_state(model.state_dict(), saved)
    parts = [optimizer.state[param]["momentum_buffer"] for param in model.parameters() if param.numel()]
    assert all(part.abs().sum() > 0 for part in parts)
    assert optimizer.param_groups[0]["lr"] != 0.5


@on_ranks(2, timeout=PATIENCE)
def test_several_optimizers_are_saved_and_loaded(tmp_path: Path) -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator()
        model = sharded("llama", "original")
        params = list(model.parameters())
        first, second = torch.optim.SGD(params[::2], lr=0.1, momentum=0.9), torch.optim.Adam(params[1::2], lr=0.1)
        model, first, second = accelerator.prepare(model, first, second)
        accelerator.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        for optimizer in (first, second):
            optimizer.step()
        accelerator.save_state(tmp_path)
        momenta = [state["momentum_buffer"].clone() for state in first.optimizer.state.values()]
        for state in first.optimizer.state.values():
            state["momentum_buffer"].zero_()
        accelerator.load_state(tmp_path)
    found = [state["momentum_buffer"] for state in first.optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(found, momenta, strict=True))
    assert any(momentum.any() for momentum in momenta)


@on_ranks(2, timeout=PATIENCE)
def test_a_rank_without_the_folder_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(FullyShardedDataParallel(nn.Linear(2, 2)))
        with pytest.raises((ValueError, fsdp.OtherRankError), match="nowhere is not a folder"):
            accelerator.load_state(tmp_path / ("nowhere" if dist.get_rank() == 1 else "."))


class Unsaved:
    """An object whose state only the first rank saves, and cannot."""

    def state_dict(self) -> dict[str, Any]:
        raise LookupError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise LookupError("no use for this state")


@on_ranks(2, timeout=PATIENCE)
def test_other_states_that_one_rank_cannot_save_or_load_are_an_error_on_every_rank(tmp_path: Path) -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(FullyShardedDataParallel(nn.Linear(2, 2)))
        accelerator.register_for_checkpointing(unsaved := Unsaved())
        with pytest.raises((LookupError, fsdp.OtherRankError), match="no state"):
            accelerator.save_state(tmp_path)
        unsaved.state_dict = dict  # type: ignore[method-assign]
        accelerator.save_state(tmp_path)
        with pytest.raises((LookupError, fsdp.OtherRankError), match="no use for this state"):
            accelerator.load_state(tmp_path)


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
def test_a_registered_average_is_loaded_by_another_number_of_ranks(ranks: RankPool, tmp_path: Path, form: str) -> None:
    """`accelerate` writes registered objects on the first rank only."""
    ranks(2, timeout=PATIENCE).run(_average, tmp_path, form)
    ranks(1, timeout=PATIENCE).run(_average, tmp_path, form)


def _average(folder: Path, form: str) -> None:
    from fsdp.accelerate import Accelerator

    is_saved = dist.get_world_size() == 1
    with as_launched():
        accelerator = Accelerator()
        model = accelerator.prepare(sharded("llama", form, seed=int(is_saved)))
        average = fsdp.EMA(model)
        accelerator.register_for_checkpointing(average)
        if not is_saved:
            accelerator.save_state(folder / "state")
            average.update_parameters(sharded("llama", form, seed=1))
        accelerator.load_state(folder / "state")
    assert_same_state(whole_state(average.module), made("llama")[0].state_dict())


@on_ranks(2, timeout=PATIENCE)
def test_states_have_automatic_names(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    from fsdp.accelerate import Accelerator

    with as_launched():
        options = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(project_config=options)
        model = accelerator.prepare(sharded("llama"))
        weights = model.state_dict()
        accelerator.save_state(max_file_bytes=4000)
        model.load_state_dict({name: torch.zeros_like(value) for name, value in weights.items()})
        accelerator.load_state()
    assert_same_state(model.state_dict(), weights)
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors.index.json").exists()


# Errors


@on_ranks(2, timeout=PATIENCE)
def test_some_parameters_are_clipped_by_their_own_norm_over_the_ranks() -> None:
    from fsdp.accelerate import Accelerator

    torch.manual_seed(0)
    plain, inputs = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    sharded = FullyShardedDataParallel(nn.Sequential(*map(FullyShardedDataParallel, copy.deepcopy(plain))))
    with as_launched():
        accelerator = Accelerator()
        model = accelerator.prepare(sharded)
        for each in (plain, model):
            each(inputs).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(plain[0].parameters(), 0.1)
        first, second = model.parameters()
        torch.testing.assert_close(accelerator.clip_grad_norm_(first, 0.1), norm)
        norms = (nn.utils.get_total_norm([param.grad for param in each.parameters()]) for each in plain)
        found = [accelerator.clip_grad_norm_([each], float("inf")) for each in (first, second)]
        torch.testing.assert_close(found, list(norms))


@on_ranks(2, timeout=PATIENCE)
def test_what_would_go_wrong_in_silence_is_an_error(tmp_path: Path) -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator()
        with pytest.raises(ValueError, match=r"Sequential contains sharded modules.* wrap the whole model too"):
            accelerator.prepare(nn.Sequential(nn.Linear(2, 2), fully_shard(nn.Linear(2, 2))))
        model = accelerator.prepare(sharded("llama"))
        with pytest.raises(ValueError, match="always saved as safetensors"):
            accelerator.save_state(tmp_path, safe_serialization=False)
        with pytest.raises(NotImplementedError, match=r"no effect on a sharded model.*use `with fsdp.join"):
            accelerator.join_uneven_inputs([model])
        accelerator.prepare(nn.Linear(2, 2))
        for method in (accelerator.save_state, accelerator.load_state):
            with pytest.raises(
                NotImplementedError, match="only a single sharded model is supported, and 2 models were prepared"
            ):
                method(tmp_path)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout=PATIENCE)
def test_local_sgd_is_an_error_before_it_averages_different_shards(form: str) -> None:
    from accelerate.local_sgd import LocalSGD

    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator()
        model = accelerator.prepare(sharded("llama", form))
        local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
        with pytest.raises(NotImplementedError, match=r"LocalSGD averages .* Use fsdp\.OuterOptimizer"), local:
            pass
        with model.no_sync(), LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False):
            pass


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_a_registered_optimizer_of_shards_is_an_error(tmp_path: Path, form: str) -> None:
    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator()
        model = accelerator.prepare(sharded("llama", form))
        accelerator.register_for_checkpointing(optimizer_of(model))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()  # which lists unsharded parameters
        with pytest.raises(ValueError, match=r"a SGD of sharded parameters .* Pass it to prepare\(\) instead"):
            accelerator.save_state(tmp_path)


@on_ranks(2, timeout=PATIENCE)
def test_ranks_that_accelerate_does_not_know_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `cpu=True` it takes each rank for the only one, which then uses all of the data."""
    from fsdp.accelerate import Accelerator

    with as_launched():
        monkeypatch.delenv("ACCELERATE_USE_CPU")
        with pytest.raises(ValueError, match=r"accelerate found 1 rank\(s\), but there are 2: pass cpu=True"):
            Accelerator().prepare(sharded("llama"))


@on_ranks(2, timeout=PATIENCE)
def test_accelerates_own_sharding_is_refused() -> None:
    from accelerate.utils import DistributedType

    from fsdp.accelerate import Accelerator

    with as_launched():
        accelerator = Accelerator()
        # Where there is no accelerator, accelerate does not get as far as this.
        accelerator.state.distributed_type = DistributedType.FSDP
        with pytest.raises(ValueError, match="configured for FSDP, which shards models itself"):
            Accelerator.adopt(accelerator)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout=PATIENCE)
def test_accelerates_own_accelerator_names_the_one_that_takes_sharded_models(form: str) -> None:
    import accelerate

    with as_launched():
        accelerator, model = accelerate.Accelerator(), sharded("llama", form)
        with pytest.raises(RuntimeError, match=r"Use fsdp\.accelerate\.Accelerator, .* fsdp\.transformers\.Trainer"):
            accelerator.prepare(model)


@on_ranks(2, timeout=PATIENCE)
def test_an_adopted_accelerator_scales_losses_for_all_ranks() -> None:
    import accelerate

    from fsdp.accelerate import Accelerator

    with as_launched():
        plain = accelerate.Accelerator(kwargs_handlers=[accelerate.utils.GradScalerKwargs(init_scale=8.0)])
        plain.scaler = torch.amp.GradScaler("cpu")  # as on a device with float16
        adopted = Accelerator.adopt(plain)
    assert adopted is plain
    assert isinstance(adopted.scaler, ShardedGradScaler)
    assert adopted.scaler.get_scale() == 8.0
    model = sharded("llama")
    assert adopted.unwrap_model(model) is plain_of(model)
