"""Publicly reported silent failures of sharded training: right here, or an error; and the peers as the page says."""

from __future__ import annotations

import re

import pytest

from tests.helpers.ranks import RankPool
from tests.helpers.silent_failures import CASES, OURS, PEERS, RIGHT, Case, outcome
from tests.tools import silent_failures as tool

PRELOAD = ["torch.distributed.fsdp", "fsdp.fully_shard", "fsdp.fully_sharded_data_parallel"]

each_case = pytest.mark.parametrize("case", CASES, ids=[case.anchor for case in CASES])


@pytest.mark.parametrize("library", OURS, ids=["wrapper", "fully_shard"])
@each_case
def test_no_case_is_silently_wrong(ranks: RankPool, case: Case, library: str) -> None:
    result = outcome(ranks(2, grace=1), case.title, library)
    pattern = case.error(library)
    assert re.search(pattern, result) if pattern else result == RIGHT, result


@pytest.mark.skipif(
    tool.conditions() not in tool.PAGE.read_text(), reason=f"the page is about another torch than {tool.VERSION}"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", PEERS)
@each_case
def test_the_page_says_how_a_peer_ends(ranks: RankPool, case: Case, library: str) -> None:
    result = outcome(ranks(2, grace=1), case.title, library)
    assert tool.cell(result, library) == cells_in_the_page(case)[library]


@each_case
def test_the_page_says_how_this_package_ends(case: Case) -> None:
    expected = {name: tool.cell(case.error(name) or RIGHT, name) for name in OURS}
    assert tool.row(case, cells_in_the_page(case) | expected) in tool.PAGE.read_text()


def cells_in_the_page(case: Case) -> dict[str, str]:
    """Return the peers' cells in the row of a case."""
    line = next(each for each in tool.PAGE.read_text().splitlines() if each.startswith(f"| [{case.title}]"))
    return dict(zip(PEERS, re.split(r" (?<!\\)\| ", line)[1:3], strict=True))
