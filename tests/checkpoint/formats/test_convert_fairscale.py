"""Writing FairScale's shards: the files that FairScale itself wrote come back, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.record_fairscale_checkpoint import CASES
from fsdp.checkpoint.formats.convert import Content, content_of
from fsdp.checkpoint.formats.convert_fairscale import write_fairscale
from fsdp.checkpoint.formats.fairscale import open_fairscale
from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.stitched import reader_of, stitched
from tests.checkpoint.formats.test_fairscale import RECORDED, every_case
from tests.helpers.legacy_sources import assert_same_state, state_of, weights_of


def content(path: Path, **options: Any) -> Content:
    return content_of(open_fairscale(path), **options)


def write(folder: Path, what: Content, like: Path) -> int:
    told: list[int] = []
    write_fairscale(str(folder), what, like, overwrite=False, advance=told.append)
    return sum(told)


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


@every_case
def test_shards_that_fairscale_wrote_come_back(tmp_path: Path, name: str) -> None:
    program, case = CASES[name]
    told = write(tmp_path / "new", content(RECORDED / name), RECORDED / name)
    files = [program.file.format(rank=rank) for rank in range(case.ranks)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == files
    found = [torch.load(tmp_path / "new" / file, weights_only=True) for file in files]
    expected = [torch.load(RECORDED / name / file, weights_only=False) for file in files]
    for own, old in zip(found, expected, strict=True):
        old["args"] = vars(old["args"])
        of_each_rank = [key for key in old["model"] if "running" in key]  # others' are not in a whole checkpoint
        old["model"] |= {key: expected[0]["model"][key] for key in of_each_rank}
        if case.is_alone:  # a unit of one rank
            old["model"]["inner.flat_param_0"] = expected[0]["model"]["inner.flat_param_0"]
            old["last_optimizer_state"]["state"][1] = expected[0]["last_optimizer_state"]["state"][1]
        assert_equal(own, old)
    sizes = [each.untyped_storage().nbytes() for one in found for each in _stored(one)]
    assert told == sum(sizes)


def _stored(content: dict[str, Any]) -> list[Tensor]:
    """What is written in pieces: weights, tied ones once, and the optimizer's state without numbers."""
    weights = {each.data_ptr(): each for each in content["model"].values()}
    state = [value for entry in content["last_optimizer_state"]["state"].values() for value in entry.values()]
    return [*weights.values(), *(value for value in state if value.dim())]


def test_tied_parameters_are_tied_in_the_files(tmp_path: Path) -> None:
    write(tmp_path / "new", content(RECORDED / "fairseq-unflattened-3"), RECORDED / "fairseq-unflattened-3")
    weights = torch.load(tmp_path / "new" / "checkpoint_last-shard1.pt", weights_only=True)["model"]
    assert weights["first.weight"].data_ptr() == weights["last.weight"].data_ptr()


def test_a_model_of_three_ranks_is_written_for_two(tmp_path: Path) -> None:
    write(tmp_path / "new", content(RECORDED / "fairseq-flat-3"), RECORDED / "metaseq-mixed-2")
    source, expected = open_fairscale(tmp_path / "new"), open_fairscale(RECORDED / "fairseq-flat-3")
    assert source.world_size == 2
    assert_equal(weights_of(source), weights_of(expected))
    assert_same_state(state_of(source), state_of(expected))


def test_weights_are_written_without_an_optimizer(tmp_path: Path) -> None:
    write(tmp_path / "new", content(RECORDED / "fairseq-flat-3", only="model"), RECORDED / "flat-2")
    source = open_fairscale(tmp_path / "new")
    assert source.optimizer is None
    assert_equal(weights_of(source), weights_of(open_fairscale(RECORDED / "fairseq-flat-3")))


# --- what cannot be written -----------------------------------------------------------------------------------------


def changed(**tensors: Tensor | None) -> Content:
    """The weights of a case with others under some names; None leaves one out."""
    source = open_fairscale(RECORDED / "flat-2")
    found = {name: stitched(name, value) for name, value in weights_of(source).items() if name not in source.aliases}
    for name, value in tensors.items():
        found.pop(name.replace("__", "."), None)
        if value is not None:
            found[name.replace("__", ".")] = stitched(name.replace("__", "."), value)
    return content_of(Source("test", "elsewhere", reader_of("elsewhere", found.values())))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"first__weight": None}, "rank0.pt has first.weight, and elsewhere has not: it is of another model"),
        ({"first__weight": torch.ones(5, 4)}, r"first.weight has shape \[5, 5\] in .*rank0.pt, and in the source"),
        ({"third__weight": torch.ones(1)}, "elsewhere has third.weight, and .*rank0.pt has not"),
    ],
)
def test_a_source_of_another_model_is_refused(tmp_path: Path, tensors: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write(tmp_path / "new", changed(**tensors), RECORDED / "flat-2")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_needs_one_in_the_old_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank0.pt has no state of an optimizer, .*--only model"):
        write(tmp_path / "new", content(RECORDED / "fairseq-flat-3"), RECORDED / "flat-2")
    assert not list(tmp_path.iterdir())


def test_shards_that_are_no_equal_parts_are_refused(tmp_path: Path) -> None:
    for rank, (begin, end) in enumerate([(0, 15), (15, 40)]):
        saved = torch.load(RECORDED / "flat-2" / f"rank{rank}.pt", weights_only=True)
        saved["weights"]["flat_param_0"] = torch.arange(40.0)[begin:end].clone()
        torch.save(saved, tmp_path / f"rank{rank}.pt")
    with pytest.raises(ValueError, match="flat_param_0 is not cut into equal parts over all ranks"):
        write(tmp_path / "new", changed(), tmp_path)


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine.txt").write_text("kept")
    with pytest.raises(FileExistsError, match="is there already"):
        write(tmp_path / "new", changed(), RECORDED / "flat-2")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
