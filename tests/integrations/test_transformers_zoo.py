"""Many families of `transformers` train sharded as they do unsharded: here each class in one of three forms.

`python -m tests.zoo` trains all classes in all forms.
"""

from __future__ import annotations

import pytest

from tests.helpers.hugging_face import PATIENCE, needs
from tests.helpers.ranks import RankPool
from tests.helpers.zoo import FAMILIES, FORMS, names

pytestmark = needs("transformers")


def test_the_zoo_has_many_families() -> None:
    assert len(FAMILIES) >= 70
    assert len(set(names())) == len(names()) >= 100


@pytest.mark.parametrize(("number", "name"), list(enumerate(names())), ids=names())
def test_a_class_trains_as_unsharded(ranks: RankPool, number: int, name: str) -> None:
    ranks(2, timeout=PATIENCE).run(train, name, FORMS[number % 3])


def train(name: str, form: str) -> None:
    from tests.helpers.zoo_training import assert_trains_as_unsharded

    assert_trains_as_unsharded(name, form)
