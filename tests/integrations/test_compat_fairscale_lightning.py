"""Lightning 1.9's own strategy for FairScale, as its package has it, over `fsdp.compat.fairscale`.

It wants a GPU; only that is taken out, so that it trains on CPU ranks.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter, FullyShardedDataParallel
from tests.data.clients.task import Net, global_batches, loss_of, own_batches
from tests.helpers.fairscale_paths import fairscale_installed
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

CLIP = 0.02


# Apart from Lightning 2, which brings a later package of the same name, and what else 1.9 imports.
FOLDER = Path(sys.prefix) / "lightning-1.9"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir() or not find_spec("torchmetrics"),
    reason=f"needs pytorch_lightning 1.9 (the last with a FairScale strategy), which `make test` puts in {FOLDER}",
)


@pytest.mark.parametrize(("wraps", "flatten_parameters"), [("layers", True), ("whole", False)])
def test_a_trainer_fits_as_one_process(ranks: RankPool, wraps: str, flatten_parameters: bool) -> None:
    results = ranks(2).run(_fit, wraps, flatten_parameters=flatten_parameters)
    for state in results:
        for name, value in _fit_alone().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_options_reach_the_wrappers(ranks: RankPool) -> None:
    ranks(2).run(_fit, "layers", move_grads_to_cpu=False, reshard_after_forward=False, compute_dtype=torch.float32)


@on_ranks(1)
def test_its_refusal_to_clip_by_norm_is_still_its_own() -> None:
    with fairscale_installed(), _lightning_1_9():
        from fairscale.optim.grad_scaler import ShardedGradScaler
        from pytorch_lightning.plugins.precision import fully_sharded_native_amp, sharded_native_amp

        assert sharded_native_amp.ShardedGradScaler is ShardedGradScaler
        plugin = fully_sharded_native_amp.FullyShardedNativeMixedPrecisionPlugin("16", "cpu", ShardedGradScaler())
        with pytest.raises(Exception, match="is currently not supported"):
            plugin.clip_grad_by_norm()


def _fit_alone() -> dict[str, Tensor]:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in global_batches():
        optimizer.zero_grad()
        loss_of(net, inputs, targets).backward()
        nn.utils.clip_grad_value_(net.parameters(), CLIP)
        optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def _fit(wraps: str, **options: Any) -> dict[str, Tensor]:
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "here"}
    with fairscale_installed(), _lightning_1_9():
        return _train(wraps, options)


@contextmanager
def _lightning_1_9() -> Iterator[None]:
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another time
        yield


def _train(wraps: str, options: dict[str, Any]) -> dict[str, Tensor]:
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    trainer = pl.Trainer(
        strategy=_strategy_on_cpu()(
            parallel_devices=[torch.device("cpu")] * dist.get_world_size(),
            cluster_environment=TorchElasticEnvironment(),
            process_group_backend="gloo",
            **options,
        ),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        gradient_clip_val=CLIP,
        gradient_clip_algorithm="value",
        replace_sampler_ddp=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = _module_class(wraps)()
    trainer.fit(module, torch.utils.data.DataLoader(list(own_batches()), batch_size=None))  # type: ignore[arg-type]
    found: Any = trainer.strategy.model
    wrapper = module.net if wraps == "layers" else found
    assert isinstance(wrapper, FullyShardedDataParallel)
    _check(wrapper, trainer.optimizers[0], options)
    state = trainer.strategy.lightning_module_state_dict()
    return {name: value.clone() for name, value in state.items()}


def _strategy_on_cpu() -> Any:
    from pytorch_lightning.strategies.fully_sharded import DDPFullyShardedStrategy

    class OnCpu(DDPFullyShardedStrategy):
        def setup_distributed(self) -> None:
            super(DDPFullyShardedStrategy, self).setup_distributed()  # its own refuses to go on without a GPU

    return OnCpu


def _module_class(wraps: str) -> Any:
    import pytorch_lightning as pl
    from fairscale.nn import wrap

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = Net() if wraps == "whole" else None

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)

    class WithLayers(Module):
        def configure_sharded_model(self) -> None:
            if self.net is None:
                self.net = wrap(Net(wrap))

    return WithLayers if wraps == "layers" else Module


def _check(wrapper: Any, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
    """What Lightning's own tests look at."""
    assert all(isinstance(param, FlatParameter) for group in optimizer.param_groups for param in group["params"])
    assert wrapper.reshard_after_forward is False  # the root
    assert wrapper.mixed_precision is False
    assert wrapper.flatten_parameters is options.get("flatten_parameters", True)
    inner = [each for each in wrapper.modules() if isinstance(each, FullyShardedDataParallel) and each is not wrapper]
    for each in inner:
        assert each.reshard_after_forward is options.get("reshard_after_forward", True)
        assert each.move_grads_to_cpu is options.get("move_grads_to_cpu", False)
