"""A training goes to another library and back by the lines of docs/leaving.md, and its table says how exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdp
from tests.helpers.forms import FORMS
from tests.helpers.hugging_face import PATIENCE
from tests.helpers.leaving import CLOSE, PAGE, RANKS, WAYS, Way, cross, ours, theirs
from tests.helpers.leaving_table import rows_in_page
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankError, RankPool

PRELOAD = ["transformers.models.llama.modeling_llama"]
OF_TRANSFORMERS = [way for way in WAYS if way.library == "transformers"]
OTHERS = [way for way in WAYS if way not in OF_TRANSFORMERS]


@parametrize_pairs(at_most=12, way=OTHERS, is_back=[False, True], form=FORMS, world_size=RANKS)
def test_a_training_goes_on(
    ranks: RankPool, tmp_path: Path, way: Way, is_back: bool, form: str, world_size: int
) -> None:
    if (way.library, world_size, is_back) == ("FSDP1", 4, False) and way.section.startswith("A folder"):
        with pytest.raises(RankError, match="Missing key in checkpoint state_dict"):
            ranks(world_size).run(cross, way, is_back, form, tmp_path)
        return
    assert_as_on_the_page(way, world_size, ranks(world_size).run(cross, way, is_back, form, tmp_path), is_back)


@needs("transformers")
@parametrize_pairs(at_most=3, way=OF_TRANSFORMERS, is_back=[False, True], form=FORMS, world_size=[2, 1])
def test_a_training_of_transformers_goes_on(
    ranks: RankPool, tmp_path: Path, way: Way, is_back: bool, form: str, world_size: int
) -> None:
    losses = ranks(world_size, timeout=PATIENCE).run(cross, way, is_back, form, tmp_path)
    assert_as_on_the_page(way, world_size, losses, is_back)


def assert_as_on_the_page(way: Way, world_size: int, losses: list[float], is_back: bool) -> None:
    row = rows_in_page()[way]
    assert is_back or world_size in row.ranks
    assert max(losses) <= (0 if world_size in row.exact else CLOSE)


def test_every_way_is_in_the_table_of_the_page() -> None:
    rows = rows_in_page()
    assert list(rows) == WAYS
    for way, row in rows.items():
        assert str(row) in PAGE.read_text("utf-8"), way
        assert row.ranks, way


@on_ranks(2)
def test_a_model_of_fsdp1_is_refused_with_the_way_to_go(tmp_path: Path) -> None:
    other = theirs("FSDP1", seed=0)
    with pytest.raises(TypeError, match=r"cannot save a checkpoint: this FullyShardedDataParallel .* torch's FSDP1"):
        fsdp.save(tmp_path / "step", other.model, other.optimizer)
    assert not (tmp_path / "step").exists()
    mine = ours("flat", seed=0)
    fsdp.save(tmp_path / "step", mine.model, mine.optimizer)
    with pytest.raises(TypeError, match=r"get_state_dict.*docs/leaving.md"):
        fsdp.load(tmp_path / "step", other.model, other.optimizer)
