"""`@on_ranks`: a test that runs on ranks gets the same arguments there, and the same marks here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankError, RankPool, Ranks


@pytest.fixture
def word() -> str:
    return "from a fixture"


@on_ranks(2)
def test_a_body_runs_on_ranks_with_fixtures(word: str, tmp_path: Path) -> None:
    assert word == "from a fixture"
    assert tmp_path.is_dir()
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("number", [1, 2])
@on_ranks(3)
@pytest.mark.parametrize("letter", ["a", "b"])
def test_parameters_may_stand_on_either_side(letter: str, number: int) -> None:
    assert (letter, number) in [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert dist.get_world_size() == 3


@on_ranks(1, 2)
def test_several_world_sizes_are_a_parameter(world_size: int) -> None:
    assert dist.get_world_size() == world_size


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_a_parameter_may_be_the_world_size(size: int) -> None:
    assert dist.get_world_size() == size


@pytest.mark.parametrize("shape", [(1, 2), (1, 3)])
@on_ranks(lambda shape: shape[0] * shape[1])
def test_a_function_of_a_parameter_may_be_the_world_size(shape: tuple[int, int]) -> None:
    assert dist.get_world_size() == shape[1]


@on_ranks(1, 3)
def test_a_body_need_not_take_its_world_size(tmp_path: Path) -> None:
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == dist.get_world_size()


@on_ranks(2, backend=None)
def test_options_are_those_of_the_pool() -> None:
    assert not dist.is_initialized()


@pytest.fixture
def three_times(ranks: RankPool) -> Callable[[int], Ranks]:
    return lambda world_size: ranks(3 * world_size)


@on_ranks(1, pool="three_times")
def test_another_fixture_may_give_the_ranks() -> None:
    assert dist.get_world_size() == 3


class TestMethods:
    base = 40

    @pytest.mark.parametrize("more", [2])
    @on_ranks(2)
    def test_a_method_runs_on_ranks(self, more: int) -> None:
        assert self.base + more == 42
        assert dist.get_world_size() == 2


@on_ranks(2)
@torch.no_grad()
def test_other_decorators_are_part_of_the_body() -> None:
    assert not torch.is_grad_enabled()


@on_ranks(2)
def _raise_on_rank_1() -> None:
    dist.barrier()
    assert dist.get_rank() == 0


@on_ranks(2)
def _skip() -> None:
    pytest.skip("not here")


def test_an_error_names_the_test_and_its_ranks(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"test_on_ranks\._raise_on_rank_1\.body on 2 ranks: 1 of 2") as failure:
        _raise_on_rank_1(ranks=ranks)
    assert "rank 1: AssertionError: assert 1 == 0" in str(failure.value)


def test_a_skip_on_every_rank_skips_the_test(ranks: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        _skip(ranks=ranks)


def test_a_world_size_is_needed() -> None:
    with pytest.raises(ValueError, match=r"on_ranks\(2\)"):
        on_ranks()


def test_ranks_are_not_an_argument() -> None:
    with pytest.raises(TypeError, match="'ranks', which no rank has"):

        @on_ranks(2)
        def body(ranks: RankPool) -> None: ...


INNER = """
from tests.helpers.on_ranks import on_ranks

@on_ranks(2)
def test_that_fails():
    print("said on a rank")
    number = 5
    assert number == 6
"""


def test_a_report_shows_the_failed_line_of_the_body(tmp_path: Path) -> None:
    inner = tmp_path / "test_inner_on_ranks.py"
    inner.write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(inner)]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert "ranks 0, 1: AssertionError: assert 5 == 6" in report, report
    assert "assert number == 6" in report, report
    assert "said on a rank" in report, report
    assert "def launch" not in report, report
