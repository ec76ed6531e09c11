"""Loops of reinforcement and preference learning, as TRL and its like write them, with ours for torch's FSDP2.

A policy and a frozen reference are sharded; the policy generates between steps; each step's weights are handed to an
inference engine. The loops are written once, and run with both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp
from tests.helpers.dtensor_twins import assert_at_rest, whole
from tests.helpers.fsdp2_clients import Decoder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.traffic import Counting, Traffic

PROMPTS, PROMPT, LENGTH, VOCABULARY, BATCHES = 4, 2, 5, 11, 2
Loss = Callable[[Any, Any, Tensor, Tensor], Tensor]


@dataclass
class Found:
    """What a rank has seen of a training."""

    generated: list[Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    engine: list[Tensor] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


def sharded(names: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Decoder().double()
    for block in model.blocks:
        names.fully_shard(block)
    return names.fully_shard(model)


def generate(model: nn.Module, prompts: Tensor) -> Tensor:
    with torch.no_grad():
        while prompts.shape[1] < LENGTH:
            prompts = torch.cat([prompts, model(prompts)[:, -1:].argmax(-1)], 1)
    return prompts


def generate_unsharded(names: Any, model: nn.Module, prompts: Tensor) -> Tensor:
    """All parameters are gathered once, and not for every token."""
    modules = [module for module in model.modules() if isinstance(module, names.FSDPModule)]
    for module in modules:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    tokens = generate(model, prompts)
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    return tokens


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of each token that follows a prompt."""
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, PROMPT - 1 :]


def reward(tokens: Tensor) -> Tensor:
    return (tokens[:, PROMPT:] % 3 == 0).float().mean(1)


def group_relative(policy: Any, reference: Any, tokens: Tensor, before: Tensor) -> Tensor:
    """Of GRPO: clipped ratios times advantages in the group, and the distance to the reference."""
    rewards = reward(tokens)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    now = log_probabilities(policy, tokens)
    with torch.no_grad():
        far = log_probabilities(reference, tokens) - now
    ratio = (now - before).exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (-gained + 0.1 * (far.exp() - far - 1) * now).mean()


def direct_preference(policy: Any, reference: Any, tokens: Tensor, before: Tensor) -> Tensor:
    """Of DPO: pairs in which one answer is preferred; two forwards of the policy before one backward."""
    better, worse = tokens, tokens.flip(0)
    with torch.no_grad():
        kept = log_probabilities(reference, better).sum(1) - log_probabilities(reference, worse).sum(1)
    learned = log_probabilities(policy, better).sum(1) - log_probabilities(policy, worse).sum(1)
    return -F.logsigmoid(0.5 * (learned - kept)).mean()


def hand_over(policy: nn.Module, engine: nn.Module) -> None:
    """Load the weights of a policy into an inference engine, one tensor after the other."""
    weights = dict(engine.named_parameters())
    with torch.no_grad():
        for name, value in policy.state_dict().items():
            weights[name].copy_(value.full_tensor())


def learn(names: Any, loss_of: Loss, steps: int = 3) -> tuple[Any, Found]:
    policy, reference, engine, found = sharded(names, 0), sharded(names, 0), Decoder().double(), Found()
    reference.requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    hand_over(policy, engine)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        prompts = torch.randint(VOCABULARY, (PROMPTS * BATCHES, PROMPT), generator=generator)
        if step % 3 == 0:
            tokens = generate(policy, prompts)
        elif step % 3 == 1:
            tokens = generate_unsharded(names, policy, prompts)
        else:
            tokens = generate(engine, prompts)
        with torch.no_grad():
            before = log_probabilities(policy, tokens)
        for turn, (some, some_before) in enumerate(zip(tokens.chunk(BATCHES), before.chunk(BATCHES), strict=True)):
            policy.set_requires_gradient_sync(turn == BATCHES - 1)
            loss = loss_of(policy, reference, some, some_before) / BATCHES
            loss.backward()
            found.losses.append(loss.item())
        found.norms.append(float(whole(nn.utils.clip_grad_norm_(policy.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        hand_over(policy, engine)
        found.generated.append(tokens)
    found.engine = [param.detach() for param in engine.parameters()]
    return policy, found


def counted(names: Any, loss_of: Loss) -> tuple[Any, Found]:
    with Counting(traffic := Traffic()):
        policy, found = learn(names, loss_of)
    found.traffic = traffic
    return policy, found


@pytest.mark.parametrize("loss_of", [group_relative, direct_preference], ids=lambda loss: loss.__name__)
@on_ranks(2)
def test_a_policy_learns_as_with_torchs(loss_of: Loss) -> None:
    import torch.distributed.fsdp as theirs

    _, expected = counted(theirs, loss_of)
    policy, found = counted(fsdp, loss_of)
    assert 0 < found.traffic.values <= expected.traffic.values
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert found.norms == pytest.approx(expected.norms, rel=1e-10)
    assert all(norm > 0 for norm in found.norms)
    for mine, other in zip(found.generated + found.engine, expected.generated + expected.engine, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    assert_at_rest(policy)
