"""Scripts written for FairScale, as its clients wrote them, run as they are: `tests/data/clients`.

`benchmarks/fairscale_clients.py` runs them with FairScale itself.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch

from tests.helpers.fairscale_paths import fairscale_installed
from tests.helpers.ranks import RankPool

CLIENTS = ["like_metaseq", "like_fairseq", "like_vissl", "like_allennlp", "like_transformers", "like_esm"]


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_trains_as_one_process(ranks: RankPool, name: str) -> None:
    ranks(2).run(_run_client, name)


def test_a_client_in_16_bits_trains_about_as_one_process_in_32(ranks: RankPool) -> None:
    ranks(2).run(_run_client, "like_vissl_mixed", rtol=2e-2, atol=2e-3)


def _run_client(name: str, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    with fairscale_installed():
        client: Any = importlib.import_module(f"tests.data.clients.{name}")
        try:
            found, expected = client.main(), client.plain()
        finally:
            del sys.modules[client.__name__]  # it holds what it imported of FairScale
    assert found["losses"] == pytest.approx(expected["losses"], rel=rtol)
    assert found["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        torch.testing.assert_close(found["state"][key], value, rtol=rtol, atol=atol)
