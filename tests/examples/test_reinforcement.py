"""The program of `examples/reinforcement`: the policy learns, and engines that end are replaced or reported."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.forked import Forked
from tests.helpers.hugging_face import PATIENCE
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import ROOT

PRELOAD = ["transformers.models.llama.modeling_llama"]
CPU = torch.device("cpu")

pytestmark = [
    needs("transformers"),
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory without files requires Linux"),
]


@contextmanager
def program() -> Iterator[Any]:
    """The example, whose engines import this library from the checkout."""
    example = importlib.reload(importlib.import_module("examples.reinforcement.train"))
    example.PATIENCE = PATIENCE / 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield example


def forked(command: list[str], **pipes: Any) -> Forked:
    """Call the engine's program in a fork, in place of `Popen`: transformers is imported already."""
    return Forked(importlib.import_module("examples.reinforcement.engine").main, *command[2:])


def run_in_fork(command: list[str], **pipes: Any) -> Forked:
    """Run the engine's file as `Popen` would, in a fork."""
    return Forked(run_program, command[1:])


def run_program(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def prompts_of(example: Any) -> Tensor:
    """Prompts that count upwards from each token."""
    return (torch.arange(example.PROMPT) + torch.arange(example.VOCABULARY)[:, None]) % example.VOCABULARY


@on_ranks(2, timeout=PATIENCE)
def test_the_policy_learns_and_is_saved_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with program() as example:
        example.Popen = run_in_fork
        rewards = example.train(CPU, tmp_path, steps=12)
    assert rewards[-1] > rewards[0] + 0.3
    assert list((tmp_path / "parked").iterdir()) == []
    dist.barrier()  # rank 0 has written the configuration
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    prompts = prompts_of(example)
    tokens = policy.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=8)
    assert example.reward_of(tokens).mean() > rewards[0] + 0.3


@on_ranks(2, timeout=PATIENCE)
def test_after_engines_were_killed_the_policy_is_bitwise_equal(tmp_path: Path) -> None:
    """One engine is killed while it receives changes, and its successor while it generates."""
    with program() as example:
        example.PROMPTS, example.BUCKET, example.Popen = 4, 1 << 15, forked  # multiple buckets
        undisturbed = example.train(CPU, tmp_path / "undisturbed", steps=4)
        processes: list[Any] = []
        streams: list[Any] = []

        class Killing(example.SharedMemorySink):  # type: ignore[misc]
            def open(self, plan: Any) -> None:
                streams.append(plan)
                super().open(plan)

            def bucket(self, number: int, tensor: Tensor) -> None:
                if len(streams) == 2 and number == 2 and processes:
                    processes[0].kill()
                super().bucket(number, tensor)

        example.SharedMemorySink = Killing

        def started(*args: Any, **options: Any) -> Any:
            processes.append(forked(*args, **options))
            return processes[-1]

        example.Popen = started
        assert example.train(CPU, tmp_path / "disturbed", steps=4, kill_engine_at=2) == undisturbed
    # Changes in step 1, all weights in step 1 to a new engine, changes in step 2, all weights in step 2, changes.
    assert [bool(plan.base) for plan in streams] == [False, True, False, True, False, True]
    assert len(streams[0].buckets) > 3
    assert len(processes) == (3 if dist.get_rank() == 0 else 0)
    assert all(process.returncode is not None for process in processes)
    saved = [(tmp_path / name / "policy" / "model.safetensors").read_bytes() for name in ("undisturbed", "disturbed")]
    assert saved[0] == saved[1]


@on_ranks(2, timeout=PATIENCE)
def test_an_engine_with_another_model_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with program() as example:
        example.Popen = forked
        config = example.configuration()
        config.intermediate_size = 96
        if dist.get_rank() == 0:
            config.save_pretrained(tmp_path)
        trainer, example.ATTEMPTS = example.Trainer(CPU, tmp_path), 1
        engine, prompts = example.Engine(tmp_path), prompts_of(example)
        with pytest.raises(RuntimeError, match=r"mlp\.down_proj\.weight has shape .*96.* in the engine, .*128"):
            example.rollouts_of(trainer, engine, prompts, 0, False)
        assert engine._process is None
        tokens = torch.cat([prompts, prompts, prompts], 1)  # training continues
        trainer.train(tokens, torch.zeros(len(tokens), example.COMPLETION), torch.rand(len(tokens)))
        assert all(param.isfinite().all() for param in trainer.model.parameters())


# Programs in place of the engine: one that ends, one that does not receive.
ENDS, SILENT = "raise SystemExit('no such model')", "import time; print('0', flush=True); time.sleep(99)"


@on_ranks(2)
@pytest.mark.parametrize(
    ("code", "report"), [(ENDS, "the engine has ended"), (SILENT, "no process listens at engine of")]
)
def test_engines_that_do_not_start_are_an_error_on_every_rank(tmp_path: Path, code: str, report: str) -> None:
    with program() as example:
        if dist.get_rank() == 0:
            (tmp_path / "engine.py").write_text(code)
        example.__file__ = str(tmp_path / "train.py")
        trainer, engine = example.Trainer(CPU, tmp_path), example.Engine(tmp_path)
        assert code == ENDS or engine.start()
        example.PATIENCE = 0.5
        example.ATTEMPTS = 1 if code == SILENT else 3
        with pytest.raises(RuntimeError, match=f"{example.ATTEMPTS} engines have failed: .*{report}"):
            example.rollouts_of(trainer, engine, prompts_of(example), 0, False)
        assert engine._process is None


@on_ranks(2)
def test_an_engine_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    with program() as example:
        if dist.get_rank() == 0:
            (tmp_path / "engine.py").write_text(SILENT)
        example.__file__ = str(tmp_path / "train.py")
        engine = example.Engine(tmp_path)
        assert engine.start()
        assert not engine.start()
        engine.ask("generate")
        with mock.patch.object(example, "PATIENCE", 0.3), pytest.raises(ConnectionError, match="took too long"):
            engine.answer()
        engine.close()
        assert engine.start()
        engine.close()
