"""Draws the picture of docs/placements.md: the bytes that each placement holds and sends, on 2 x 2 ranks.

PYTHONPATH=. python docs/pictures/placements.py
"""

from __future__ import annotations

from pathlib import Path

from _svg import GRADIENT, SHARD, STEP, UNSHARDED, Drawing

from fsdp import Placements, ShardingStrategy
from fsdp.engine.placements import Axis, Stage

NUMEL, SHARDS, REPLICAS = 12, 2, 2
NAMES = [
    "FULL_SHARD",
    "SHARD_OPTIM_GRADS",
    "SHARD_OPTIM",
    "HYBRID_SHARD",
    "HYBRID_SHARD_OPTIM",
    "NO_SHARD",
]
LEFT = 200


def sent(stages: tuple[Stage, ...], sizes: dict[Axis, int]) -> float:
    return sum(stage.numel_sent(NUMEL, sizes) for stage in stages) / NUMEL


def main() -> None:
    drawing = Drawing(1120, 80 + 66 * len(NAMES))
    entries = (SHARD, "optimizer state"), (UNSHARDED, "parameters"), (GRADIENT, "gradients"), (STEP, "sent")
    drawing.legend(LEFT, 10, *entries, step=160)
    titles = ["held between steps", "held after a backward", "sent once a step", "and in each micro-batch"]
    for column, title in enumerate(titles):
        drawing.text(LEFT + 226 * column, 52, title)
    for row, name in enumerate(NAMES):
        strategy, y = ShardingStrategy[name], 66 + 66 * row
        value = Placements.from_strategy(strategy)
        sizes = {Axis.SHARD: SHARDS, Axis.REPLICA: REPLICAS}
        if not strategy.is_hybrid:  # one group of all ranks
            value, sizes = value.on_one_axis(), {Axis.SHARD: SHARDS * REPLICAS, Axis.REPLICA: 1}
        drawing.text(10, y + 26, name)
        state = value.optimizer.numel(NUMEL, sizes) / NUMEL
        kept = value.parameters.numel(NUMEL, sizes) / NUMEL if value.gather else 0
        gradient = value.gradients.numel(NUMEL, sizes) / NUMEL
        uses = 2 if value.unshard else 0
        bars = [
            [(state, SHARD), (state, UNSHARDED)],
            [(state, SHARD), (state + kept, UNSHARDED), (gradient, GRADIENT)],
            [(sent(value.gather, sizes) + sent(value.settle, sizes), STEP)],
            [(uses * sent(value.unshard, sizes) + sent(value.reduce, sizes), STEP)],
        ]
        for column, parts in enumerate(bars):
            x = LEFT + 226 * column
            for numel, color in parts:
                if numel:
                    drawing.box(x, y + 4, 56 * numel, 34, color)
                    x += 56 * numel
            drawing.text(x + 5, y + 26, f"{sum(numel for numel, _ in parts):.2f} P")
    words = "P: the bytes of all parameters, and of the optimizer state; 2 machines of 2 ranks"
    drawing.text(LEFT, 74 + 66 * len(NAMES), words)
    drawing.save(Path(__file__).with_name("placements.svg"))


if __name__ == "__main__":
    main()
