"""FairScale's FSDP as large language model trainers of its time used it: a subclass, and checkpoints of shards."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import enable_wrap, wrap
from fairscale.nn.data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.utils.testing import DummyProcessGroup
from torch import Tensor, nn

from tests.data.clients.task import Net, loss_of, mean_over_ranks, own_batches, trained_alone

MAX_NORM = 0.5


class FSDP(FullyShardedDataParallel):
    """Saves shards instead of the whole, if asked to."""

    def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
        self.use_sharded_state = use_sharded_state
        super().__init__(*args, **kwargs)

    @property
    def unwrapped_module(self) -> nn.Module:
        return self.module.module if self.flatten_parameters else self.module

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        if self.use_sharded_state:
            return super().local_state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.rank == 0:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        super().state_dict()
        return destination or {}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        if self.use_sharded_state:
            return super().load_local_state_dict(state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict=strict)


@contextlib.contextmanager
def fsdp_enable_wrap(use_sharded_state: bool) -> Any:
    group = dist.new_group()
    config = {
        "process_group": group,
        "process_group_reduce_scatter": group,
        "reshard_after_forward": True,
        "mixed_precision": False,
        "fp32_reduce_scatter": False,
        "flatten_parameters": True,
        "cpu_offload": False,
        "compute_dtype": torch.float32,
        "bucket_cap_mb": 25,
        "state_dict_device": torch.device("cpu"),
        "gradient_predivide_factor": 2.0,
        "compute_device": torch.device("cpu"),
    }
    with enable_wrap(wrapper_cls=FSDP, use_sharded_state=use_sharded_state, **config):
        yield


class WrappedOptimizer:
    """An optimizer with a loss scale beside it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.loss_scale = optimizer, 4.0

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss_scale = state.pop("loss_scale")
        self.optimizer.load_state_dict(state)


def clip_grad_norm_(params: list[nn.Parameter], max_norm: float) -> Tensor:
    """With a sum over ranks of what is sharded."""
    is_sharded = [hasattr(param, "_is_sharded") for param in params if param.grad is not None]
    assert all(is_sharded)
    squares = torch.stack([param.grad.float().square().sum() for param in params if param.grad is not None]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for param in params:
        if param.grad is not None:
            param.grad.mul_(min(max_norm / (float(norm) + 1e-6), 1.0))
    return norm


def build(use_sharded_state: bool) -> Any:
    with fsdp_enable_wrap(use_sharded_state):
        return wrap(Net(wrap))


def train(model: Any) -> tuple[WrappedOptimizer, list[float]]:
    optimizer = WrappedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for inputs, targets in own_batches():
        optimizer.optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), MAX_NORM)
        optimizer.optimizer.step()
        losses.append(mean_over_ranks(loss))
    return optimizer, losses


def consolidated(model: Any) -> dict[str, Tensor]:
    """Whole weights from the shards of all ranks, as an offline tool makes them."""
    own = {"model": model.state_dict(), "shard_metadata": model.local_metadata_dict()}
    own = copy.deepcopy(own)
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    for shard in shards:
        for unit in shard["shard_metadata"]["param_metadata"]:
            assert set(unit) >= {"fsdp_path", "params", "no_broadcast_optim_state", "shared_param_info"}
            for backing, values in unit["params"].items():
                assert backing.startswith("flat_param_0")
                names, shapes, numels, padding = values.values()
                assert len(names) == len(shapes) == len(numels)
                assert padding >= 0
    return FSDP.consolidate_shard_weights(
        shard_weights=[shard["model"] for shard in shards],
        shard_metadata=[shard["shard_metadata"] for shard in shards],
        strict=True,
    )


def plain_name(name: str) -> str:
    """As logs show it."""
    return name.replace("_fsdp_wrapped_module._fpw_module.", "").removesuffix("._fsdp_wrapped_module.flat_param_0")


def average_of_one() -> None:
    """The copy for an average, in 16 bits, on every rank by itself."""
    group = DummyProcessGroup(rank=0, size=1)
    net = Net().half()
    ema = FSDP(
        net,
        group,
        process_group_reduce_scatter=group,
        mixed_precision=False,
        compute_dtype=torch.float16,
        compute_device=torch.device("cpu"),
    )
    assert ema.rank == 0
    ema.half()
    with torch.no_grad():
        assert ema(torch.ones(1, 6).half()).dtype is torch.float16
    assert {value.dtype for value in ema.state_dict().values()} == {torch.float16}


def main() -> dict[str, Any]:
    model = build(use_sharded_state=True)
    assert model.process_group.size() == dist.get_world_size()
    assert isinstance(model.unwrapped_module, Net)
    assert isinstance(model.unwrapped_module.layers[0].unwrapped_module, nn.Module)
    assert {plain_name(name) for name, _ in model.named_parameters()} == {
        "_fsdp_wrapped_module.flat_param_0",
        "layers.0",
        "layers.1",
    }
    optimizer, losses = train(model)
    model.assert_state(TrainingState.IDLE)
    weights = consolidated(model)

    full = model.gather_full_optim_state_dict(optimizer)
    assert (full is None) == (dist.get_rank() != 0)
    box = [full]
    dist.broadcast_object_list(box, src=0)
    assert box[0]["loss_scale"] == 4.0
    again = build(use_sharded_state=True)
    with torch.no_grad():
        again(torch.ones(1, 6))  # the dummy batch that comes before a checkpoint is loaded
    again.load_state_dict(model.state_dict())
    resumed = WrappedOptimizer(torch.optim.Adam(again.parameters(), lr=1e-2))
    resumed.load_state_dict(again.get_shard_from_optim_state_dict(box[0]))
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        expected = optimizer.optimizer.state[old]["exp_avg"]
        torch.testing.assert_close(resumed.optimizer.state[new]["exp_avg"], expected)

    whole = build(use_sharded_state=False)
    whole.load_state_dict(weights)
    with whole.summon_full_params():
        for name, param in whole.named_parameters():
            torch.testing.assert_close(param.detach(), weights[name])
    saved = whole.state_dict()
    assert bool(saved) == (dist.get_rank() == 0)
    average_of_one()
    return {"losses": losses, "state": weights}


def plain() -> dict[str, Any]:
    net = Net()
    return trained_alone(net, torch.optim.Adam(net.parameters(), lr=1e-2), MAX_NORM)
