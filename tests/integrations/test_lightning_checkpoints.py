"""Lightning's checkpoints under `FullyShardedStrategy`: full and sharded, read by any number of ranks and by others."""

from __future__ import annotations

import io
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.optim_utils import full_optim_state_dict
from tests.conftest import LitRanks
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.ranks import RankError

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]

WRAPS: list[dict[str, Any]] = [{}, {"auto_wrap_policy": {nn.Linear}}, {"flatten_parameters": False}]


@parametrize_cases(at_most=3, kind=["full", "sharded"], saved_by=[2, 3], loaded_by=[3, 2], saved=WRAPS, loaded=WRAPS)
def test_training_goes_on_at_another_number_of_ranks(lit_ranks: LitRanks, tmp_path: Path, case: Case) -> None:
    lit_ranks(case.saved_by).run(_fit, tmp_path, case.kind, case.saved, epochs=2)
    lit_ranks(case.loaded_by).run(_fit, tmp_path, case.kind, case.loaded, epochs=4)


def _fit(folder: Path, kind: str, options: dict[str, Any], epochs: int) -> None:
    from tests.helpers import lightning as lit

    path = folder / "last.ckpt"
    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind, **options)
    trainer = lit.trainer(folder, strategy=strategy, max_epochs=epochs)
    # Other values than those that were saved, so that loading shows.
    lit.fitted(lit.Regression(seed=5 if epochs == 4 else 0), trainer, ckpt_path=path if epochs == 4 else None)
    assert trainer.current_epoch == epochs
    expected = lit.trained_alone(lit.Regression(), epochs=epochs)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**epochs)
    trainer.save_checkpoint(path)
    assert path.is_file() if kind == "full" else path.is_dir()


@parametrize_pairs(at_most=2, kind=["full", "sharded"], loaded_by=[3, 2])
def test_training_goes_on_after_modules_were_thawed(
    lit_ranks: LitRanks, tmp_path: Path, kind: str, loaded_by: int
) -> None:
    """The callback adds the parameters after the model was loaded."""
    lit_ranks(2).run(_thaw, tmp_path, kind, epochs=2)
    lit_ranks(loaded_by).run(_thaw, tmp_path, kind, epochs=3)


def _thaw(folder: Path, kind: str, epochs: int) -> None:
    from tests.helpers import lightning as lit

    path = folder / "last.ckpt"
    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
    trainer = lit.trainer(folder, strategy=strategy, max_epochs=epochs, callbacks=[lit.Thaw()])
    lit.fitted(lit.FineTuned(), trainer, ckpt_path=path if epochs == 3 else None)
    if epochs == 2:
        trainer.save_checkpoint(path)
        return
    # As in one process, the callback does not thaw again: only the head is trained.
    assert len(trainer.optimizers[0].param_groups) == 2
    state = full_optim_state_dict(trainer.model, trainer.optimizers[0], recipient_rank=None)["state"]
    assert "net.scale" in state
    assert not torch.equal(lit.state_of(trainer)["net.scale"], torch.ones(5))


def test_a_full_checkpoint_is_what_one_process_would_save(lit_ranks: LitRanks, tmp_path: Path) -> None:
    lit_ranks(2).run(_save_full, tmp_path)
    lit_ranks(1).run(_read_alone, tmp_path)


def _save_full(folder: Path) -> None:
    from tests.helpers import lightning as lit

    trainer = lit.fitted(lit.Regression(), lit.trainer(folder))
    trainer.save_checkpoint(folder / "all.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)


def _read_alone(folder: Path) -> None:
    from tests.helpers import lightning as lit

    module = lit.Regression.load_from_checkpoint(folder / "all.ckpt")
    alone = lit.Regression()
    torch.testing.assert_close(dict(module.state_dict()), lit.trained_alone(alone), rtol=1e-4, atol=1e-6)
    found = torch.load(folder / "all.ckpt", weights_only=True)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.load_state_dict(found["optimizer_states"][0])
    for param in module.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert optimizer.state[param]["step"] == lit.STEPS
    assert "optimizer_states" not in torch.load(folder / "weights.ckpt", weights_only=True)


@pytest.mark.parametrize("options", WRAPS, ids=["orig", "units", "one by one"])
def test_a_checkpoint_of_an_unsharded_trainer_is_read(
    lit_ranks: LitRanks, tmp_path: Path, options: dict[str, Any]
) -> None:
    lit_ranks(1).run(_fit_unsharded, tmp_path)
    lit_ranks(2).run(_fit_from_unsharded, tmp_path, options)


def _fit_unsharded(folder: Path) -> None:
    from tests.helpers import lightning as lit

    lit.fitted(lit.Regression(), lit.trainer(folder, strategy="ddp", max_epochs=1)).save_checkpoint(folder / "ddp.ckpt")


def _fit_from_unsharded(folder: Path, options: dict[str, Any]) -> None:
    from tests.helpers import lightning as lit

    trainer = lit.trainer(folder, strategy=lit.fsdp.lightning.FullyShardedStrategy(**options), max_epochs=2)
    lit.fitted(lit.Regression(seed=5), trainer, ckpt_path=folder / "ddp.ckpt")
    expected = lit.trained_alone(lit.Regression(), epochs=2)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


def test_numbers_without_names_are_refused_where_they_mean_something_else(lit_ranks: LitRanks, tmp_path: Path) -> None:
    lit_ranks(1).run(_fit_unsharded, tmp_path)
    lit_ranks(2).run(_load_flat, tmp_path)


def _load_flat(folder: Path) -> None:
    from tests.helpers import lightning as lit

    trainer = lit.trainer(folder, strategy=lit.fsdp.lightning.FullyShardedStrategy(use_orig_params=False), max_epochs=2)
    with pytest.raises(ValueError, match="numbers the parameters of an unsharded model"):
        lit.fitted(lit.OfTheTrainersModel(), trainer, ckpt_path=folder / "ddp.ckpt")


@parametrize_pairs(background=[False, True], kind=["full", "sharded"])
@on_lit_ranks(2)
def test_callbacks_keep_the_best_and_stop_early(tmp_path: Path, kind: str, background: bool) -> None:
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import AsyncCheckpointIO

    from tests.helpers import lightning as lit

    class Worse(lit.Regression):
        """Which gets worse after the second epoch."""

        def on_validation_epoch_end(self) -> None:
            self.log("badness", abs(self.current_epoch - 1.0), sync_dist=True)

    best = callbacks.ModelCheckpoint(tmp_path / "best", monitor="badness", save_top_k=1, save_last=True)
    stop = callbacks.EarlyStopping("badness", patience=2)
    rates = callbacks.LearningRateMonitor("epoch")
    module = Worse()
    trainer = lit.trainer(
        tmp_path,
        strategy=lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind),
        callbacks=[best, stop, rates],
        plugins=[AsyncCheckpointIO()] * background,
        logger=CSVLogger(tmp_path),
        enable_checkpointing=True,
        max_epochs=9,
    )
    lit.fitted(module, trainer)
    dist.barrier()  # the first rank removes what is not wanted any more
    assert trainer.current_epoch == 4
    assert os.path.basename(best.best_model_path) == "epoch=1-step=8.ckpt"
    assert sorted(each.name for each in (tmp_path / "best").iterdir()) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert rates.lrs["lr-AdamW"] == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    with lit.quiet():
        trainer.validate(module, lit.batches(range(90, 92)), ckpt_path="best", verbose=False)
    expected = lit.trained_alone(lit.Regression(), epochs=2)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


def test_a_sharded_checkpoint_is_a_folder_for_every_tool(lit_ranks: LitRanks, tmp_path: Path) -> None:
    lit_ranks(2).run(_save_sharded, tmp_path)
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "last.ckpt" / "model.safetensors")) == {
        "net.scale",
        "net.shift",
        "net.layers.0.weight",
        "net.layers.0.bias",
        "net.layers.1.weight",
        "net.layers.1.bias",
        "head.weight",
        "head.bias",
    }
    assert fsdp.checkpoint.verify(tmp_path / "last.ckpt") > 0


def _save_sharded(folder: Path) -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type="sharded")
    trainer = lit.fitted(lit.Regression(), lit.trainer(folder, strategy=strategy))
    trainer.save_checkpoint(folder / "last.ckpt")
    trainer.save_checkpoint(folder / "last.ckpt")  # in the place of the old one
    plain = lit.Regression(seed=7)
    fsdp.load(folder / "last.ckpt", plain)
    torch.testing.assert_close(dict(plain.state_dict()), lit.state_of(trainer))
    rest = torch.load(io.BytesIO(fsdp.checkpoint.values(folder / "last.ckpt")["lightning"]))  # docs/lightning.md
    assert rest["hyper_parameters"] == dict(trainer.lightning_module.hparams)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_lit_ranks(2)
def test_several_optimizers_go_on(tmp_path: Path, kind: str) -> None:
    from tests.helpers import lightning as lit
    from tests.helpers.lightning_manual import Adversaries, turns_alone

    for epochs, path in ((1, None), (2, tmp_path / "last.ckpt")):
        strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
        trainer = lit.trainer(tmp_path, strategy=strategy, max_epochs=epochs)
        module = Adversaries(None, 1)
        with lit.quiet():
            trainer.fit(module, lit.batches(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    expected = turns_alone(Adversaries(None, 1), epochs=2)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_lit_ranks(2)
def test_the_wish_for_more_than_weights_only_is_heard(tmp_path: Path, kind: str) -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
    trainer = lit.fitted(lit.Regression(note=Note()), lit.trainer(tmp_path, strategy=strategy))
    trainer.save_checkpoint(tmp_path / "note.ckpt")
    again = lit.trainer(tmp_path, max_epochs=2)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        lit.fitted(lit.Regression(), again, ckpt_path=tmp_path / "note.ckpt")
    again = lit.trainer(tmp_path, max_epochs=2)
    lit.fitted(lit.Regression(), again, ckpt_path=tmp_path / "note.ckpt", weights_only=False)
    expected = lit.trained_alone(lit.Regression(), epochs=2)
    torch.testing.assert_close(lit.state_of(again), expected, rtol=1e-4, atol=1e-6)


class Note:
    """Which is not safe to read from a file of somebody else."""


@on_lit_ranks(2)
def test_hooks_see_and_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    class Hooked(lit.Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert bool(checkpoint["state_dict"]) is (dist.get_rank() == 0)
            checkpoint["mine"] = 7

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["mine"]
            checkpoint["state_dict"]["head.bias"] = torch.full((1,), 5.0)

    lit.fitted(Hooked(), lit.trainer(tmp_path)).save_checkpoint(tmp_path / "last.ckpt")
    module = Hooked()
    trainer = lit.trainer(tmp_path)
    with lit.quiet():
        trainer.validate(module, lit.batches(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert module.found == 7
    assert lit.state_of(trainer)["head.bias"] == 5.0


# What does not work


@pytest.mark.parametrize("kind", ["full", "sharded"])
@on_lit_ranks(2)
def test_all_ranks_hear_that_one_could_not_write(tmp_path: Path, kind: str) -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
    trainer = lit.fitted(lit.Regression(), lit.trainer(tmp_path, strategy=strategy))
    in_the_way = tmp_path / "taken.ckpt"
    if kind == "full":
        in_the_way.mkdir(exist_ok=True)
    elif dist.get_rank() == 0:
        in_the_way.write_text("a file")
    dist.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"taken\.ckpt"):
        trainer.save_checkpoint(in_the_way)
    trainer.save_checkpoint(tmp_path / "free.ckpt")
    trainer.lightning_module.hparams["note"] = lambda: None  # which nobody can pickle
    with pytest.raises((AttributeError, RuntimeError, pickle.PicklingError), match="pickle"):
        trainer.save_checkpoint(tmp_path / "never.ckpt")


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_an_exception_of_one_rank_is_no_reason_to_save(lit_ranks: LitRanks, tmp_path: Path, kind: str) -> None:
    lit_ranks(2).run(_fail, tmp_path / "both", kind, 0, 1)
    assert len(list((tmp_path / "both").rglob("*.ckpt"))) == 1
    with pytest.raises(RankError, match=r"cannot save after its exception: within 1 s, ranks \[0\] had none") as error:
        lit_ranks(2, grace=1).run(_fail, tmp_path / "one", kind, 1)
    assert "a bad batch" in str(error.value)


def _fail(folder: Path, kind: str, *failing: int) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.helpers import lightning as lit

    class Failing(lit.Regression):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2 and dist.get_rank() in failing:
                raise ValueError("a bad batch")
            return super().training_step(batch, index)

    saving = ModelCheckpoint(folder, save_on_exception=True)
    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
    with (
        mock.patch.object(lit.fsdp.lightning, "_FOR_ERRORS", timedelta(seconds=60 if len(failing) == 2 else 1)),
        pytest.raises(ValueError, match="a bad batch"),
    ):
        lit.fitted(Failing(), lit.trainer(folder, strategy=strategy, callbacks=[saving], enable_checkpointing=True))


@on_lit_ranks(2)
def test_what_is_no_checkpoint_is_told_on_every_rank(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
    fsdp.save(tmp_path / "other", model)
    mine = tmp_path / f"rank{dist.get_rank()}.ckpt"
    for path, error in (
        (tmp_path / "missing.ckpt", "missing.ckpt"),
        (tmp_path / "other", "is a checkpoint, but not of a Trainer"),
        (mine, "rank0.ckpt"),  # the first rank's path counts
    ):
        with pytest.raises((FileNotFoundError, ValueError, RuntimeError), match=error):
            lit.fitted(lit.Regression(), lit.trainer(tmp_path), ckpt_path=path)


@on_lit_ranks(2)
def test_a_model_that_does_not_fit_is_told_by_name(tmp_path: Path) -> None:
    from tests.helpers import lightning as lit

    class Another(lit.Regression):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    for kind in ("full", "sharded"):
        strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
        lit.fitted(lit.Regression(), lit.trainer(tmp_path, strategy=strategy)).save_checkpoint(tmp_path / kind)
        with pytest.raises(RuntimeError, match=r"more\.weight"), lit.quiet():
            lit.trainer(tmp_path).validate(Another(), lit.batches(), ckpt_path=tmp_path / kind, verbose=False)
        module = Another()
        module.strict_loading = False
        with lit.quiet():
            lit.trainer(tmp_path).validate(module, lit.batches(), ckpt_path=tmp_path / kind, verbose=False)


@on_lit_ranks(2)
def test_sharded_checkpoints_go_by_no_plugin(tmp_path: Path) -> None:
    from lightning.fabric.plugins import TorchCheckpointIO

    from tests.helpers import lightning as lit

    class Mine(TorchCheckpointIO):
        pass

    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type="sharded")
    trainer = lit.fitted(lit.Regression(), lit.trainer(tmp_path, strategy=strategy))
    with pytest.raises(ValueError, match="without storage_options and CheckpointIO plugins"):
        trainer.save_checkpoint(tmp_path / "last.ckpt", storage_options={})
    with pytest.raises(ValueError, match="written to file systems"):
        trainer.save_checkpoint("memory://last.ckpt")
    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type="sharded")
    trainer = lit.fitted(lit.Regression(), lit.trainer(tmp_path, strategy=strategy, plugins=[Mine()]))
    with pytest.raises(ValueError, match="without storage_options and CheckpointIO plugins"):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = lit.fitted(lit.Regression(), lit.trainer(tmp_path, plugins=[Mine()]))
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    if dist.get_rank() == 0:
        assert torch.load(tmp_path / "mine.ckpt", weights_only=True)["state_dict"]
