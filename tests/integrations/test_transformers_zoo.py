"""Many families of `transformers` train sharded as they do unsharded: here a class of every twentieth family.

Each is trained in one of three forms. `python -m tests.zoo` trains all classes in all forms.
"""

from __future__ import annotations

import pytest

from tests.helpers.hugging_face import MODULES, PATIENCE
from tests.helpers.needs import needs
from tests.helpers.ranks import RankPool
from tests.helpers.zoo import FAMILIES, FORMS, heads, names

pytestmark = needs("transformers")
PRELOAD = MODULES
RUNS = 6  # in each as many classes, since a run costs some time


def test_the_zoo_has_many_families() -> None:
    assert len(FAMILIES) >= 140
    assert len(set(names())) == len(names()) >= 170


@pytest.mark.parametrize("number", range(RUNS), ids=lambda number: f"{FORMS[number % 3]}-{number // 3}")
def test_classes_train_as_unsharded(ranks: RankPool, number: int) -> None:
    world_size = 3 if number < 3 else 2  # one run of each form on either
    chosen = [name for name in names() if name not in heads()][::20]
    ranks(world_size, timeout=PATIENCE).run(train, chosen[number::RUNS], FORMS[number % 3], thorough=False)


def train(classes: list[str], form: str, *, thorough: bool = True) -> None:
    from tests.helpers.zoo_training import assert_trains_as_unsharded

    for name in classes:
        try:
            assert_trains_as_unsharded(name, form, thorough=thorough)
        except Exception as error:
            error.add_note(f"{name}, {form}")
            raise
