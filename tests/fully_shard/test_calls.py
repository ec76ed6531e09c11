"""Random sequences of calls find the same as with torch's `fully_shard` (`tests.tools.compare_calls`)."""

from __future__ import annotations

import pytest

from tests.helpers.on_ranks import on_ranks
from tests.tools.compare_calls import CALLS, Calls, difference


@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 2), (2, 4)])
@on_ranks("world_size")
def test_random_sequences_of_calls_find_the_same_as_with_torchs(seed: int, world_size: int) -> None:
    assert not difference(Calls.of_seed(seed, world_size))


def test_a_sequence_follows_from_its_seed_and_all_calls_occur() -> None:
    sequences = [Calls.of_seed(seed, 4) for seed in range(100)]
    assert sequences == [Calls.of_seed(seed, 4) for seed in range(100)]
    assert {name for one in sequences for name, _ in one.calls} == set(CALLS)
