"""What a user of `fsdp` writes, with types; `mypy --strict` has nothing to say of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import (
    EMA,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OwnedOptimizer,
    Plan,
    PlannedWrapping,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictStager,
    auto_wrap,
    checkpoint_wrapper,
    enable_wrap,
    fully_shard,
    module_wrap_policy,
    optim_utils,
    wrap,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.linear(inputs))


def blocks() -> nn.Sequential:
    return nn.Sequential(*(checkpoint_wrapper(Block(8)) for _ in range(3)))


def by_wrapper() -> FullyShardedDataParallel:
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=policy):
        inner = auto_wrap(blocks(), module_wrap_policy({Block}))
        print(wrap(Block(8)))
    model = FullyShardedDataParallel(
        inner,
        process_group=dist.group.WORLD,
        mixed_precision=policy,
        reshard_after_forward=False,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        offload="cpu",
    )
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    norm: Tensor = model.clip_grad_norm_(1.0)
    with model.summon_full_params():
        total = sum(param.sum().item() for param in model.parameters())
    print(norm, total, model.report())
    return model


def by_module() -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Block(8)
    sharded = fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True
    )
    sharded.set_requires_gradient_sync(False)
    sharded.unshard()
    sharded.reshard()
    same: Block = model
    print(model.linear.weight, sharded(torch.ones(1, 8)))
    return same


def plans() -> Iterator[str]:
    plan: Plan = fsdp.plan(blocks(), 8, optimizer=torch.optim.SGD, sample=torch.ones(2, 8), bandwidth=1e9)
    peak: int = plan.peak
    wrapping: PlannedWrapping = fsdp.plan_wrapping(blocks(), 8, 1e9, sample=torch.ones(2, 8))
    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        auto_wrap(blocks(), wrapping)
    for name, reshards in wrapping.units.items():
        yield f"{name} {reshards} {peak}"


def main() -> None:
    model = by_wrapper()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    owned = OwnedOptimizer(model, [{"params": list(model.parameters()), "optimizer": torch.optim.SGD, "lr": 0.1}])
    scaler = ShardedGradScaler()
    ema = EMA(model)
    with fsdp.trace(model, "trace.json", steps=3) as trace:
        loss = model(torch.ones(2, 8)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)
        with ema.applied_to(model):
            full = optim_utils.full_optim_state_dict(model, optimizer)
        mine = optim_utils.shard_full_optim_state_dict(model, full or {}, optimizer)
        optimizer.load_state_dict(mine)
    print(trace, trace.report().units[0].waited)
    fsdp.save("checkpoint", model=model, optimizer=optimizer, values={"step": 3})
    values = fsdp.load("checkpoint", model=model, optimizer=optimizer)
    print(values.step, owned, StateDictStager, fsdp.state_dict_utils)


if __name__ == "__main__":
    main()
