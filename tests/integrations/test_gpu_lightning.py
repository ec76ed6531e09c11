"""Lightning's strategy on CUDA: devices, offload and precisions; as test_lightning_training.py on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.needs import needs
from tests.helpers.ranks import Ranks

pytestmark = [pytest.mark.gpu, needs("lightning")]


@pytest.mark.parametrize(
    "options", [{}, {"cpu_offload": True}, {"reshard_after_forward": False}], ids=["plain", "offload", "kept"]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_fits_as_one_process(
    accelerator_ranks: Callable[..., Ranks], options: dict[str, Any], world_size: int
) -> None:
    if world_size > torch.cuda.device_count():
        pytest.skip(f"Lightning needs a GPU per rank: {world_size} ranks, {torch.cuda.device_count()} GPUs")
    accelerator_ranks(world_size, backend="nccl", timeout=240.0).run(_fit, options, "32-true")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions_train_about_as_float32(accelerator_ranks: Callable[..., Ranks], precision: str) -> None:
    accelerator_ranks(1, backend="nccl", timeout=240.0).run(_fit, {}, precision)


def _fit(options: dict[str, Any], precision: Any) -> None:
    from tests.helpers import lightning as lit

    strategy = lit.fsdp.lightning.FullyShardedStrategy(
        parallel_devices=[torch.device("cuda", index) for index in range(dist.get_world_size())], **options
    )
    trainer = lit.trainer(strategy=strategy, accelerator="cuda", precision=precision, gradient_clip_val=0.5)
    module = lit.WithLayers()
    lit.fitted(module, trainer)
    assert module.device.type == "cuda"
    kept_on = {param.device.type for param in trainer.model.parameters()}
    assert kept_on == {"cpu" if options.get("cpu_offload") else "cuda"}
    alone = lit.Regression()
    clip = lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5)  # noqa: E731
    expected = lit.trained_alone(alone, clip=clip)
    tolerance = 1e-4 if precision == "32-true" else 0.1
    found = {name: value.float() for name, value in lit.state_of(trainer).items()}
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
