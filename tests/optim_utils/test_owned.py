"""Optimizers of whole parameters, each stepped by its owner, compute what they compute without sharding, to the bit."""

from __future__ import annotations

import pytest

from tests.helpers.owned import FORMS, Twin, muon_and_adamw, owned, talk, train_both
from tests.helpers.ranks import RankPool


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_muon_by_owners_beside_sharded_adamw(ranks: RankPool, world_size: int, form: str) -> None:
    ranks(world_size).run(_train, form)


def _train(form: str) -> None:
    model = talk(FORMS[form])
    optimizer = owned(model, muon_and_adamw())
    train_both(model, optimizer, Twin(muon_and_adamw()), range(3))
