"""`fsdp.transformers.Trainer`: it does what `transformers.Trainer` does with the plain model in one process.

The data set is as large as a few global batches, which have the same rows at every number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.checkpoint.cli import main
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.hugging_face import (
    BATCH,
    LENGTH,
    MODULES,
    PATIENCE,
    VOCABULARY,
    arguments,
    as_launched,
    from_pretrained,
    logits,
    made,
    plain_of,
    recipe,
    rows,
    save_with_torchs_fsdp,
    sharded,
    trainer_of,
)
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, RankPool

pytestmark = needs("transformers", "accelerate")
PRELOAD = MODULES

Log = list[dict[str, float]]


def model_of(family: str, form: str | None) -> Any:
    return made(family)[0] if form is None else sharded(family, form)


def train(
    folder: Path, family: str, form: str | None, options: dict[str, Any], resume: bool = False
) -> tuple[Log, dict[str, Tensor]]:
    """What a Trainer logs, and the weights that it arrives at. `form` None is the plain model."""
    with as_launched():
        trainer = trainer_of(model_of(family, form), folder, **options)
        trainer.train(resume_from_checkpoint=resume or None)
        trainer.evaluate()
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    compared = ("loss", "grad_norm", "learning_rate", "eval_loss")
    log = [{name: entry[name] for name in compared if name in entry} for entry in trainer.state.log_history]
    return log, {name: value.clone() for name, value in weights.items()}


def alone(ranks: RankPool, *args: Any) -> tuple[Log, dict[str, Tensor]]:
    return ranks(1, timeout=PATIENCE).run(train, *args)[0]  # type: ignore[no-any-return]


def assert_close_trainings(found: tuple[Log, dict[str, Tensor]], expected: tuple[Log, dict[str, Tensor]]) -> None:
    assert len(found[0]) == len(expected[0])
    for entry, wanted in zip(found[0], expected[0], strict=True):
        assert entry == pytest.approx(wanted, rel=1e-5)
    # The biases of attention's keys have no gradient but rounding errors, which Adam scales up; a step is 1e-2.
    assert_close_state(found[1], expected[1], rtol=1e-4, atol=1e-5)


# Training


@pytest.mark.parametrize(
    ("size", "family", "form", "options"),
    [
        (2, "llama", "flat", {}),
        (3, "gpt2", "original", {"weight_decay": 0.5, "gradient_accumulation_steps": 2}),
        (2, "gpt2", "fully_shard", {"weight_decay": 0.5, "gradient_accumulation_steps": 2}),
        (2, "llama", "fully_shard", {"label_smoothing_factor": 0.1}),
        (2, "llama", "original", {"max_grad_norm": 0.0, "activation_checkpointing": True}),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, size: int, family: str, form: str, options: dict[str, Any]
) -> None:
    expected = alone(ranks, tmp_path, family, None, options)
    assert any("eval_loss" in entry for entry in expected[0])
    assert all(entry["grad_norm"] > 0.2 for entry in expected[0] if "grad_norm" in entry)
    assert_close_trainings(ranks(size, timeout=PATIENCE).run(train, tmp_path, family, form, options)[0], expected)


def test_bf16_computes_under_autocast(ranks: RankPool, tmp_path: Path) -> None:
    expected, exact = (alone(ranks, tmp_path, "llama", None, {"bf16": on})[0][0]["loss"] for on in (True, False))
    found = ranks(2, timeout=PATIENCE).run(train, tmp_path, "llama", "flat", {"bf16": True})[0][0][0]["loss"]
    assert found == pytest.approx(expected, abs=2e-6) != pytest.approx(exact, abs=2e-6)


def test_rows_that_ranks_see_twice_count_once_in_an_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(1, timeout=PATIENCE).run(_evaluate, tmp_path, None)[0]
    assert ranks(2, timeout=PATIENCE).run(_evaluate, tmp_path, "flat") == [pytest.approx(expected, rel=1e-5)] * 2


def _evaluate(folder: Path, form: str | None) -> float:
    with as_launched():
        trainer = trainer_of(model_of("llama", form), folder, per_device_eval_batch_size=1)
        return trainer.evaluate(rows(5, seed=2))["eval_loss"]  # type: ignore[no-any-return]


# Checkpoints

SAVING: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 4,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
}

DECAYING = {**SAVING, "weight_decay": 0.5}


@pytest.mark.parametrize(("form", "other"), [("flat", "flat"), ("original", "fully_shard")])
def test_resuming_with_more_ranks_goes_on_as_if_nothing_had_happened(
    ranks: RankPool, tmp_path: Path, form: str, other: str
) -> None:
    expected = alone(ranks, tmp_path / "plain", "llama", None, SAVING)
    ranks(2, timeout=PATIENCE).run(_train_half, tmp_path / "run", form)
    found = ranks(3, timeout=PATIENCE).run(train, tmp_path / "run", "llama", other, SAVING, True)[0]
    assert_close_trainings(found, expected)


@pytest.mark.parametrize("form", ["original", "fully_shard"])
def test_a_plain_trainer_goes_on_with_a_converted_optimizer(ranks: RankPool, tmp_path: Path, form: str) -> None:
    """docs/leaving.md has the command."""
    expected = alone(ranks, tmp_path / "plain", "gpt2", None, DECAYING)
    ranks(2, timeout=PATIENCE).run(_train_half, tmp_path / "run", form, "gpt2", DECAYING)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    assert main(["convert", checkpoint, f"{checkpoint}/optimizer.pt", "--only", "optimizer", "--by-number"]) == 0
    assert_close_trainings(alone(ranks, tmp_path / "run", "gpt2", None, DECAYING, True), expected)


def test_a_checkpoint_with_other_parameter_groups_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """The Trainer makes groups by names, and flat parameters are in one group whatever their names."""
    ranks(2, timeout=PATIENCE).run(_train_half, tmp_path / "run", "flat")
    with pytest.raises(
        RankError, match="in parameter groups 0 and 1, but that of the checkpoint has them in groups 0 and 0"
    ):
        ranks(2, timeout=PATIENCE).run(train, tmp_path / "run", "llama", "original", SAVING, True)


def _train_half(folder: Path, form: str | None, family: str = "llama", options: dict[str, Any] = SAVING) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc]
        """As if the job had been killed: the schedule is that of all steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    with as_launched():
        trainer = trainer_of(model_of(family, form), folder, **options)
        trainer.add_callback(Stop())
        trainer.train()


@pytest.mark.parametrize(("kind", "form"), [("SHARDED_STATE_DICT", "original"), ("FULL_STATE_DICT", "fully_shard")])
def test_a_training_with_torchs_fsdp_is_resumed(ranks: RankPool, tmp_path: Path, kind: str, form: str) -> None:
    expected = alone(ranks, tmp_path / "plain", "llama", None, SAVING)
    ranks(2, timeout=PATIENCE).run(_train_half, tmp_path / "run", "original")
    ranks(2, timeout=PATIENCE).run(_save_with_torchs_fsdp, tmp_path / "run" / "checkpoint-2", kind)
    found = ranks(3, timeout=PATIENCE).run(train, tmp_path / "run", "llama", form, SAVING, True)[0]
    assert_close_trainings(found, expected)


def _save_with_torchs_fsdp(folder: Path, kind: str) -> None:
    plain = made("llama")[0]
    names = {id(param): name for name, param in plain.named_parameters()}
    groups = trainer_of(plain, folder.parent, **SAVING).create_optimizer().param_groups
    named = [{**group, "params": [names[id(param)] for param in group["params"]]} for group in groups]
    params = dict(torchs_fully_shard(plain).named_parameters())
    optimizer = torch.optim.AdamW({**group, "params": [params[name] for name in group["params"]]} for group in named)
    save_with_torchs_fsdp(folder, kind, plain, optimizer)


@pytest.mark.parametrize(("family", "form"), [("gpt2", "original"), ("llama", "fully_shard")])
def test_a_training_without_sharding_is_resumed(ranks: RankPool, tmp_path: Path, family: str, form: str) -> None:
    expected = alone(ranks, tmp_path / "plain", family, None, SAVING)
    ranks(1, timeout=PATIENCE).run(_train_half, tmp_path / "run", None, family)
    found = ranks(3, timeout=PATIENCE).run(train, tmp_path / "run", family, form, SAVING, True)[0]
    assert_close_trainings(found, expected)


def test_a_training_without_sharding_is_not_resumed_with_flat_parameters(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1, timeout=PATIENCE).run(_train_half, tmp_path / "run", None)
    with pytest.raises(RankError, match="numbers the parameters of an unsharded model, but a flat parameter contains"):
        ranks(2, timeout=PATIENCE).run(train, tmp_path / "run", "llama", "flat", SAVING, True)


@on_ranks(2, timeout=PATIENCE)
def test_a_checkpoint_of_the_model_alone_is_resumed_with_a_new_optimizer(tmp_path: Path) -> None:
    with as_launched():
        first = trainer_of(sharded("llama"), tmp_path, save_only_model=True, **SAVING)
        first.train()
        weights = first.model_wrapped.state_dict()
        again = trainer_of(sharded("llama"), tmp_path, **SAVING | {"max_steps": 6, "learning_rate": 0.0})
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 6
        assert_same_state(again.model_wrapped.state_dict(), weights)


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_from_pretrained_reads_checkpoints_and_saved_models(tmp_path: Path, form: str) -> None:
    with as_launched():
        trainer = trainer_of(sharded("gpt2", form), tmp_path, **SAVING)
        trainer.train()
        trainer.save_model()
    expected = logits(trainer.model_wrapped)
    if dist.get_rank() == 0:
        for saved in (tmp_path, tmp_path / "checkpoint-4"):
            assert torch.equal(logits(from_pretrained("gpt2", saved)), expected)
            assert (saved / "training_args.bin").exists()
        assert not torch.equal(logits(from_pretrained("gpt2", tmp_path / "checkpoint-2")), expected)


@on_ranks(2, timeout=PATIENCE)
def test_all_ranks_hear_that_the_first_could_not_write(tmp_path: Path) -> None:
    with as_launched():
        trainer = trainer_of(sharded("llama"), tmp_path / "run", **SAVING)
        taken = tmp_path / f"taken{dist.get_rank()}"
        taken.touch()
        with pytest.raises((OSError, fsdp.OtherRankError), match="taken0"):
            trainer.save_model(str(taken / "model"))


@on_ranks(2, timeout=PATIENCE)
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    with as_launched():
        options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        trainer = trainer_of(sharded("llama"), tmp_path, **SAVING | options)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        assert best.name == "checkpoint-2"
        found = logits(trainer.model_wrapped)
    if dist.get_rank() == 0:
        assert torch.equal(logits(from_pretrained("llama", best)), found)


@on_ranks(2, timeout=PATIENCE)
def test_it_mixes_into_trainers_with_other_arguments_before_args(tmp_path: Path) -> None:
    """As those of trl have them: a reference model, or functions of rewards."""
    import transformers

    from fsdp.transformers import Trainer

    class Rewarded(transformers.Trainer):
        def __init__(self, model: nn.Module, rewards: Any, args: Any = None, **options: Any) -> None:
            super().__init__(model, args, **options)
            self.rewards = rewards

    class Mine(Trainer, Rewarded):  # type: ignore[misc]
        """As users make it."""

    with as_launched():
        args = arguments(tmp_path)
        for trainer in (Mine(sharded("llama"), len, args), Mine(model=sharded("llama"), args=args, rewards=len)):
            assert trainer.args is args
            assert trainer.rewards is len
        with pytest.raises(ValueError, match="torch_compile: the model is sharded already"):
            Mine(sharded("llama"), len, arguments(tmp_path, torch_compile=True))


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_subclasses_generate_different_numbers_of_tokens_on_the_ranks(tmp_path: Path, form: str) -> None:
    """Trainers of reinforcement learning call `generate` without `synced_gpus`."""
    plain, model = made("llama")[0].eval(), sharded("llama", form)
    prompts, most = [row["input_ids"][None] for row in rows(2, seed=2)], {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        first = plain.generate(prompts[0], **most)[0, LENGTH:]
    most |= {"eos_token_id": int(first[0]), "pad_token_id": 0}  # the first rank's row ends with its first token
    expected = [plain.generate(prompt, **most) for prompt in prompts]
    assert expected[0].shape != expected[1].shape
    with as_launched(), torch.no_grad():
        trainer = trainer_of(model, tmp_path)
        found = (
            trainer.accelerator.unwrap_model(trainer.model_wrapped).eval().generate(prompts[dist.get_rank()], **most)
        )
    assert torch.equal(found[:, : expected[dist.get_rank()].shape[1]], expected[dist.get_rank()])


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_evaluations_generate_different_numbers_of_tokens_on_the_ranks(tmp_path: Path, form: str) -> None:
    plain, model = made("llama")[0].eval(), sharded("llama", form)
    data, most = rows(4, seed=2), {"max_new_tokens": 6}
    with torch.no_grad():
        first = plain.generate(data[0]["input_ids"][None], do_sample=False, **most)[0, LENGTH:]
    # The first rank's row ends with its first token.
    for each in (plain, plain_of(model)):
        each.config.pad_token_id = each.generation_config.pad_token_id = 0
        each.generation_config.eos_token_id = int(first[0])
        each.generation_config.do_sample = False
    expected = [plain.generate(row["input_ids"][None], **most)[0].tolist() for row in data]
    assert len({len(row) for row in expected}) > 1
    found = predicted(model, tmp_path, data, **most)
    for row, wanted in zip(found.tolist(), expected, strict=True):
        padding = [0] * (len(row) - len(wanted))
        assert row == wanted + padding


@pytest.mark.parametrize("form", ["flat", "fully_shard"])
@on_ranks(2, timeout=PATIENCE)
def test_evaluations_generate_with_an_encoder_and_a_decoder(tmp_path: Path, form: str) -> None:
    """`generate` calls the encoder before the model, and the encoder reads the embedding that it shares."""
    import transformers

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 3}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
        )

    plain, data = model().eval(), rows(4, seed=2)
    whole = model()
    unit = fully_shard(whole) if form == "fully_shard" else FullyShardedDataParallel(whole)
    found = predicted(unit, tmp_path, data, max_new_tokens=4, do_sample=False)
    for row, each in zip(found.tolist(), data, strict=True):
        wanted = plain.generate(each["input_ids"][None], max_new_tokens=4, do_sample=False)[0].tolist()
        assert row == wanted + [0] * (len(row) - len(wanted))


def predicted(model: Any, folder: Path, data: list[dict[str, Tensor]], **options: Any) -> Any:
    """Collective. Predict by generating, with a Trainer that is mixed into one of `transformers`."""
    import transformers

    from fsdp.transformers import Trainer

    class Mine(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
        """As users make it."""

    with as_launched():
        args = transformers.Seq2SeqTrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            per_device_eval_batch_size=1,
            predict_with_generate=True,
        )
        return Mine(model, args).predict(data, **options).predictions


# Errors


@on_ranks(2, timeout=PATIENCE)
def test_what_the_trainer_cannot_do_is_said(tmp_path: Path) -> None:
    from fsdp.transformers import Trainer

    with as_launched():
        plain = made("llama")[0]
        with pytest.raises(ValueError, match="LlamaForCausalLM is not sharded: wrap it first"):
            Trainer(plain, arguments(tmp_path))
        with pytest.raises(ValueError, match=r"Sequential contains sharded modules.* wrap the whole model too"):
            Trainer(nn.Sequential(sharded("llama")), arguments(tmp_path))
        with pytest.raises(TypeError, match="does not support model_init"):
            Trainer(args=arguments(tmp_path), model_init=lambda: plain)
        model = sharded("llama")
        with pytest.raises(ValueError, match="auto_find_batch_size, torch_compile: the model is sharded already"):
            Trainer(model, arguments(tmp_path, auto_find_batch_size=True, torch_compile=True))
        alone = arguments(tmp_path)
        alone.distributed_state = None  # as without use_cpu=True, where there is no accelerator
        with pytest.raises(ValueError, match=r"found 1 rank\(s\), but there are 2: pass use_cpu=True"):
            Trainer(model, alone)
        trainer = trainer_of(model, tmp_path, weight_decay=0.1)
        with pytest.raises(ValueError, match=r"weight_decay excludes .* use_orig_params=True"):
            trainer.train()
        trainer = trainer_of(sharded("llama", "fully_shard"), tmp_path, optim="adafactor")
        with pytest.raises(RuntimeError, match="Adafactor combines rows and columns in place"):
            trainer.train()


@on_ranks(2, timeout=PATIENCE)
def test_the_trainer_shows_the_model_and_the_wrapper(tmp_path: Path) -> None:
    with as_launched():
        model = sharded("llama")
        trainer = trainer_of(model, tmp_path)
        assert trainer.model is plain_of(model)
        assert trainer.model_wrapped is model
        assert trainer.label_names == ["labels"]


@on_ranks(2, timeout=PATIENCE)
def test_the_recipe_trains_goes_on_and_saves_for_from_pretrained(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    with as_launched():
        recipe("trainer").train(sharded("gpt2"), rows(5 * BATCH), str(tmp_path), max_steps=2, **options)
        other = sharded("gpt2", seed=3)
        trainer = recipe("trainer").train(other, rows(5 * BATCH), str(tmp_path), resume=True, max_steps=3, **options)
        whole = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    assert trainer.state.global_step == 3
    if dist.get_rank() == 0:
        found = from_pretrained("gpt2", tmp_path).state_dict()
        assert_same_state({name: found[name] for name in whole}, whole)
