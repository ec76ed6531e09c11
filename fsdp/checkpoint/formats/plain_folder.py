"""Folders with a model in safetensors files and a plain optimizer in a file of `torch.save`, by numbers.

The Trainer of `transformers` writes them without sharding (``optimizer.pt``), and so does `accelerate`
(``optimizer.bin``). The numbers count the parameters in the optimizer's groups, one group after another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.trees import Choices, is_optimizer_state, source_of_tree
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, SafetensorsFiles
from fsdp.checkpoint.untrusted import reading, short

_MODELS = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def plain_optimizer(path: str) -> str | None:
    """Return the file of the optimizer in such a folder; None if the folder is of another kind."""
    if not any(os.path.isfile(os.path.join(path, name)) for name in _MODELS):
        return None
    places = (os.path.join(path, name) for name in _OPTIMIZERS)
    return next((place for place in places if os.path.isfile(place)), None)


def read_plain(path: str, optimizer: str, choices: Choices, groups: Sequence[Sequence[str]] | None = None) -> Source:
    """Open model and optimizer.

    The names of the parameters by their numbers are `choices.param_order`, or those in `groups`, which must be as many
    as in the groups of the file.
    """
    files = SafetensorsFiles(path)
    with files:
        tree = {"model": {name: found.tensor for name, found in files.tensors.items()}}
        identity = files.digest
    if choices.only != "model":
        with reading(optimizer):
            archive = TorchArchive(optimizer)
            tree["optimizer"] = archive.content
            identity += archive.identity
            if groups is not None:
                choices = replace(choices, param_order=_in_order(optimizer, archive.content, groups))
    with reading(path):
        source = source_of_tree("safetensors", path, tree, choices)
    return replace(source, identity=hashlib.sha256(identity.encode()).hexdigest())


def _in_order(optimizer: str, content: Any, groups: Sequence[Sequence[str]]) -> list[str]:
    saved = [len(group["params"]) for group in content["param_groups"]] if is_optimizer_state(content) else []
    given = list(map(len, groups))
    if saved != given:
        raise ValueError(
            f"{optimizer} has parameter groups of {short(saved)} parameters, and the given optimizer of {given}: make "
            "it with the same groups"
        )
    return list(chain.from_iterable(groups))
