"""Reinforcement learning: a sharded policy, and an inference engine in a process of its
own.

    torchrun --nproc-per-node 2 examples/reinforcement/train.py
    torchrun --nproc-per-node 2 examples/reinforcement/train.py --kill-engine-at 15

In each step, the engine receives the newest weights through shared memory and samples
completions, while the optimizer is parked. The policy, a small Llama with random
weights, learns to count upwards.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fsdp
from fsdp.weights import SafetensorsSink, SharedMemorySink, Snapshot

VOCABULARY, PROMPT, COMPLETION = 8, 4, 8
PROMPTS, GROUP = 16, 8  # in a step, and the completions of each
PASSES, CLIP = 2, 0.2  # over the rollouts of a step, of the ratio
BUCKET = 1 << 20  # bytes
PATIENCE = 60.0  # seconds to wait for the engine
ATTEMPTS = 3  # engines for a step


def configuration() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,  # all completions have the same length
        pad_token_id=0,
    )


def reward_of(tokens: Tensor) -> Tensor:
    """The share of a completion's tokens that continue to count, [rollouts]."""
    follows = (tokens[:, 1:] - tokens[:, :-1]) % VOCABULARY == 1
    return follows[:, PROMPT - 1 :].float().mean(1)


class Trainer:
    """The methods that frameworks of reinforcement learning call, on every rank."""

    def __init__(self, device: torch.device, parking: Path) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        plain = LlamaForCausalLM(configuration()).to(device)
        self.model = fsdp.shard(plain, units={LlamaDecoderLayer})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.snapshot = Snapshot()  # the weights that the engine has
        self._device, self._parking = device, parking

    def train(self, tokens: Tensor, sampled: Tensor, rewards: Tensor) -> None:
        """Update the policy by a loss like GRPO's. All ranks pass the same rollouts.

        Args:
            tokens: prompts and completions, [rollouts, PROMPT + COMPLETION].
            sampled: the engine's log-probabilities, [rollouts, COMPLETION].
            rewards: [rollouts]; the rollouts of a prompt are adjacent.
        """
        groups = rewards.view(-1, GROUP)
        advantages = groups - groups.mean(1, keepdim=True)
        advantages /= groups.std(1, keepdim=True) + 1e-4
        tokens, sampled, advantages = (
            each.chunk(dist.get_world_size())[dist.get_rank()].to(self._device)
            for each in (tokens, sampled, advantages.view(-1, 1))
        )
        for _ in range(PASSES):
            logits = self.model(input_ids=tokens[:, :-1]).logits[:, PROMPT - 1 :]
            chosen = tokens[:, PROMPT:, None]
            logprobs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
            # The engine computes in bfloat16; the ratio corrects the difference.
            ratio = (logprobs - sampled).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * advantages, clipped * advantages).mean()
            loss.backward()
            self.model.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def update_weights(self, engine: str) -> None:
        """Send all weights the first time, and then the changes."""
        fsdp.stream_weights(
            self.model,
            SharedMemorySink(engine, timeout=PATIENCE),
            bucket_bytes=BUCKET,
            dtype=torch.bfloat16,
            since=self.snapshot,
        )

    def save_model(self, folder: Path) -> None:
        """Write the files that `from_pretrained` reads."""
        fsdp.stream_weights(self.model, SafetensorsSink(folder), bucket_bytes=BUCKET)
        if dist.get_rank() == 0:
            configuration().save_pretrained(folder)

    def asleep(self) -> AbstractContextManager[int]:
        """Free the memory of gradients and optimizer inside the context. Parameters
        stay, since `update_weights` sends them.
        """
        return fsdp.parked(
            self.model,
            self.optimizer,
            to=self._parking if self._device.type == "cpu" else "host",
            parts=["gradients", "optimizer"],
        )


def on_first_rank(job: Callable[[], Any]) -> Any:
    """Collective. Call a function on rank 0; every rank returns its result, or raises
    its OSError.
    """
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            result = [job()]
        except OSError as error:
            result = [error]
    dist.broadcast_object_list(result)
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


class Engine:
    """The process of engine.py, of which rank 0 has the pipes. All methods but `close`
    are collective, and raise an OSError on every rank if the process has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.name = on_first_rank(lambda: f"engine of {os.getpid()}")
        self._folder = folder
        self._process: Any = None  # Popen[str], on rank 0

    def start(self) -> bool:
        """Start the process unless it runs. True if it is new, and has no weights."""

        def start() -> bool:
            if self._process is not None:
                return False
            file = Path(__file__).with_name("engine.py")
            command = [sys.executable, str(file), str(self._folder), self.name]
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
            self._read()
            return True

        return bool(on_first_rank(start))

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a request."""
        request = json.dumps({"do": do, "arguments": arguments})
        on_first_rank(lambda: print(request, file=self._process.stdin, flush=True))

    def answer(self) -> Any:
        """Wait for the answer to a request, and return it on every rank."""
        return json.loads(on_first_rank(self._read))

    def _read(self) -> str:
        timer = Timer(PATIENCE, self.kill)
        timer.start()
        line: str = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise ConnectionError("the engine has ended, or took too long")
        return line

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process, if this rank has it."""
        self.kill()
        if self._process is not None:
            self._process.communicate()  # which waits, and closes the pipes
            self._process = None


def rollouts_of(
    trainer: Trainer, engine: Engine, prompts: Tensor, seed: int, is_killed: bool
) -> tuple[Tensor, Tensor]:
    """Collective. Let an engine with the newest weights complete prompts. After an
    error, a new engine receives all weights.

    Returns: the tokens and the engine's log-probabilities, as for `Trainer.train`.
    """
    failure: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            if engine.start():
                trainer.snapshot.clear()
            engine.ask("update")
            trainer.update_weights(engine.name)
            engine.answer()
            if is_killed and failure is None:
                engine.kill()
            engine.ask(
                "generate", prompts=prompts.tolist(), tokens=COMPLETION, seed=seed
            )
            answer = engine.answer()
            tokens = torch.cat([prompts, torch.tensor(answer["completions"])], 1)
            return tokens, torch.tensor(answer["logprobs"])
        except (OSError, RuntimeError) as error:  # on every rank
            failure = error
            engine.close()
            if dist.get_rank() == 0:
                print(f"the engine is started again: {error}", flush=True)
    raise RuntimeError(f"{ATTEMPTS} engines have failed: {failure}") from failure


def train(
    device: torch.device, folder: Path, steps: int = 40, kill_engine_at: int = -1
) -> list[float]:
    """Collective. Train and save the policy, and return the mean reward of steps."""
    trainer = Trainer(device, folder / "parked")
    if dist.get_rank() == 0:
        configuration().save_pretrained(folder / "engine")
    rewards = []
    with closing(Engine(folder / "engine")) as engine:
        for step in range(steps):
            seeded = torch.Generator().manual_seed(step)  # equal on all ranks
            prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT), generator=seeded)
            prompts = prompts.repeat_interleave(GROUP, 0)
            with trainer.asleep():
                is_killed = step == kill_engine_at
                tokens, logprobs = rollouts_of(
                    trainer, engine, prompts, step, is_killed
                )
            reward = reward_of(tokens)
            trainer.train(tokens, logprobs, reward)
            rewards.append(reward.mean().item())
            if dist.get_rank() == 0 and step % 10 == 9:
                print(f"step {step}: reward {rewards[-1]:.2f}", flush=True)
    trainer.save_model(folder / "policy")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40, help="[%(default)s]")
    parser.add_argument("--kill-engine-at", type=int, default=-1, metavar="STEP")
    asked = parser.parse_args()
    device = fsdp.init_distributed()
    train(device, Path("runs/reinforcement"), asked.steps, asked.kill_engine_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
