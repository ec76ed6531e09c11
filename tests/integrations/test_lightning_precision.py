"""Lightning's precisions under `FullyShardedStrategy`, against the same in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardedGradScaler, get_fsdp_instances
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks
from tests.helpers.pairs import parametrize_pairs

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]

# By precision: the dtype of shards, of what is computed with, and how far from one process it may end.
DTYPES: dict[str, tuple[torch.dtype, torch.dtype, float]] = {
    "32-true": (torch.float32, torch.float32, 1e-5),
    "64-true": (torch.float64, torch.float64, 1e-12),
    "bf16-true": (torch.bfloat16, torch.bfloat16, 0.1),
    "16-true": (torch.float16, torch.float16, 0.02),
    "bf16-mixed": (torch.float32, torch.bfloat16, 0.03),
}


@parametrize_pairs(precision=list(DTYPES), kind=["Regression", "WithLayers"])
@on_lit_ranks(2)
def test_a_precision_trains_as_in_one_process(precision: str, kind: str) -> None:
    from tests.helpers import lightning as lit

    own, compute, tolerance = DTYPES[precision]
    seen: list[tuple[torch.dtype, ...]] = []

    class Seen(getattr(lit, kind)):  # type: ignore[misc]
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            weight = self.net.scale
            with torch.no_grad():
                seen.append((batch[0].dtype, weight.dtype, self.net.shift.dtype, (batch[0] @ weight).dtype))
            return super().training_step(batch, index)

    with lit.quiet():
        trainer = lit.fitted(Seen(), lit.trainer(precision=precision, max_epochs=2))
    data = torch.float32 if "mixed" in precision else own
    assert set(seen) == {(data, compute, own, compute)}
    assert {param.dtype for param in trainer.model.parameters()} == {own}
    assert all(unit.compute_dtype == compute for unit in get_fsdp_instances(trainer.model))
    alone = lit.Regression().to(own)
    autocast = torch.bfloat16 if precision == "bf16-mixed" else None
    expected = lit.trained_alone(alone, epochs=2, dtype=data, autocast=autocast)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=tolerance, atol=tolerance)


@on_lit_ranks(2)
def test_targets_keep_their_digits_under_mixed_precision() -> None:
    from tests.helpers import lightning as lit

    seen: list[tuple[torch.dtype, torch.dtype]] = []

    class Seen(lit.WithLayers):
        def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            loss = super().loss(batch)
            seen.append((batch[1].dtype, loss.dtype))
            return loss

    lit.fitted(Seen(), lit.trainer(precision="bf16-mixed"))
    assert set(seen) == {(torch.float32, torch.float32)}


@on_lit_ranks(2)
def test_layers_that_autocast_leaves_alone_on_cpu_compute() -> None:
    from tests.helpers import lightning as lit

    class Normed(lit.Regression):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.Sequential(nn.LayerNorm(5), nn.RMSNorm(5), nn.GroupNorm(1, 5))
            self.mix = nn.Bilinear(5, 5, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            normed = self.norms(inputs)
            mixed: Tensor = super().forward(self.mix(inputs, normed) + normed)
            return mixed

    torch.manual_seed(0)
    alone = Normed()
    torch.manual_seed(0)
    strategy = lit.fsdp.lightning.FullyShardedStrategy(auto_wrap_policy={nn.Sequential, lit.Net})
    trainer = lit.fitted(Normed(), lit.trainer(strategy=strategy, precision="bf16-mixed"))
    expected = lit.trained_alone(alone, autocast=torch.bfloat16)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("in_float32", [False, True])
@on_lit_ranks(1)
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(in_float32: bool) -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(fp32_reduce_scatter=in_float32, compute_dtype=torch.float16)
    with lit.quiet():
        lit.trainer(strategy=strategy, precision="bf16-mixed")
    policy = strategy._precision_arguments()["mixed_precision"]
    assert policy.reduce_dtype is (torch.float32 if in_float32 else None)  # None: that of the computation
    assert policy.param_dtype is torch.float16


@on_lit_ranks(2)
def test_half_precision_is_scaled_and_steps_are_skipped_together() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from tests.helpers import lightning as lit

    scaler = ShardedGradScaler(init_scale=256.0, device="cpu")

    class Overflowing(lit.Regression):
        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = super().training_step(batch, index)
            return loss * 1e30 if index == 1 and dist.get_rank() == 1 else loss

    trainer = lit.trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    lit.fitted(Overflowing(), trainer)
    assert trainer.precision_plugin.scaler.get_scale() == 128.0
    # Of four steps the second is left out, on both ranks.
    steps = {float(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {3.0}
    scaler = ShardedGradScaler(init_scale=256.0, device="cpu")
    again = lit.trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer = lit.fitted(lit.Regression(), again)
    expected = lit.trained_alone(lit.Regression(), autocast=torch.float16)
    torch.testing.assert_close(lit.state_of(trainer), expected, rtol=0.02, atol=0.02)


@on_lit_ranks(2)
def test_a_scaler_becomes_one_whose_ranks_agree() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from tests.helpers import lightning as lit

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    trainer = lit.trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    own = trainer.precision_plugin
    assert isinstance(own.scaler, ShardedGradScaler)
    assert (own.scaler.get_scale(), own.scaler.get_growth_interval()) == (8.0, 3)
    off = lit.trainer(plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))])
    assert not off.precision_plugin.scaler.is_enabled()


@on_lit_ranks(2)
def test_a_plugin_of_one_s_own_clips_by_the_norm_over_all_ranks() -> None:
    from lightning.pytorch.plugins import Precision

    from tests.helpers import lightning as lit

    class Mine(Precision):
        pass

    trainer = lit.fitted(lit.Regression(), lit.trainer(plugins=[Mine()], gradient_clip_val=0.1))
    expected = lit.trained_alone(lit.Regression(), clip=lambda params: nn.utils.clip_grad_norm_(params, 0.1))
    torch.testing.assert_close(lit.state_of(trainer), expected)


@on_lit_ranks(2)
def test_a_scaler_goes_on_where_it_was_saved(tmp_path: Any) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    from tests.helpers import lightning as lit

    plugin = MixedPrecision("16-mixed", "cpu", ShardedGradScaler(init_scale=64.0, device="cpu"))
    lit.fitted(lit.Regression(), lit.trainer(tmp_path, plugins=[plugin])).save_checkpoint(tmp_path / "last.ckpt")
    trainer = lit.trainer(tmp_path, plugins=[MixedPrecision("16-mixed", "cpu")], max_epochs=2)
    lit.fitted(lit.Regression(), trainer, ckpt_path=tmp_path / "last.ckpt")
    assert trainer.precision_plugin.scaler.get_scale() == 64.0
