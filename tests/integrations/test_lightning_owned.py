"""Lightning trains with an `OwnedOptimizer`, and its full checkpoints are read by another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp
from tests.conftest import LitRanks
from tests.helpers.needs import needs

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_goes_on_at_another_number_of_ranks(lit_ranks: LitRanks, tmp_path: Path, kind: str) -> None:
    lit_ranks(2).run(_fit, tmp_path, kind, epochs=1)
    lit_ranks(3).run(_fit, tmp_path, kind, epochs=2)


def _fit(folder: Path, kind: str, epochs: int) -> None:
    from tests.helpers import lightning as lit

    class WithOwners(lit.Regression):
        def stepping(self, params: Any) -> Any:
            return fsdp.OwnedOptimizer(self.trainer.model, [{"optimizer": torch.optim.Adafactor, "lr": 0.05}])

    path = folder / "last.ckpt"
    strategy = lit.fsdp.lightning.FullyShardedStrategy(state_dict_type=kind)
    trainer = lit.trainer(folder, strategy=strategy, max_epochs=epochs)
    module = WithOwners(seed=5 if epochs == 2 else 0)
    lit.fitted(module, trainer, ckpt_path=path if epochs == 2 else None)
    alone = lit.Regression()
    optimizer = torch.optim.Adafactor(alone.parameters(), lr=0.05)
    for step in [*range(lit.STEPS)] * epochs:
        optimizer.zero_grad()
        alone.loss(lit.global_batch(step)).backward()
        optimizer.step()
    torch.testing.assert_close(lit.state_of(trainer), dict(alone.state_dict()), rtol=1e-4, atol=1e-5)
    trainer.save_checkpoint(path)
