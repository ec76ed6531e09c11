"""Every name, method, argument and default of torch's FSDP2 is here, or the page says why not."""

from __future__ import annotations

import torch.distributed.fsdp as torchs

import fsdp
from tests.tools import compare_fsdp2


def test_nothing_of_the_installed_torch_is_missing() -> None:
    assert compare_fsdp2.differences() == []


def test_every_reason_is_about_a_name_that_is_here() -> None:
    ours = compare_fsdp2.surface(fsdp)
    assert set(compare_fsdp2.DIFFERENCES) | set(compare_fsdp2.NEW_SINCE_2_11) <= set(ours)


def test_all_public_names_of_torchs_are_compared() -> None:
    of_fsdp2 = {name for name in torchs.__all__ if "fsdp._fully_shard" in _source(getattr(torchs, name))}
    assert of_fsdp2 <= set(compare_fsdp2.NAMES)


def _source(value: object) -> str:
    return getattr(__import__("inspect").getmodule(getattr(value, "__init__", value)), "__name__", "")


def test_the_table_in_the_page_is_what_is_installed() -> None:
    assert compare_fsdp2.table() in compare_fsdp2.PAGE.read_text()
