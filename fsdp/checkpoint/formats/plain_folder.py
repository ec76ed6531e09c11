"""Folders with a model and an unsharded optimizer, whose state is keyed by numbers.

The Trainer of `transformers` (``optimizer.pt``) and `accelerate` (``optimizer.bin``) write such folders without
sharding. The model is in files of safetensors or of `torch.save`, the optimizer in a file of `torch.save`. The numbers
are the positions of the parameters across all groups of the optimizer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from fsdp.checkpoint.formats.source import Source
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.trees import Choices, is_optimizer_state, source_of_tree
from fsdp.checkpoint.safetensors import INDEX_SUFFIX, SUFFIX, SafetensorsFiles, files_by_name
from fsdp.checkpoint.untrusted import reading, short

# `transformers` uses the first existing file.
_MODELS = (f"model{SUFFIX}", f"model{INDEX_SUFFIX}", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")


def plain_optimizer(path: str) -> str | None:
    """Return the file of the optimizer in such a folder; None for any other folder."""
    return None if _first(path, _MODELS) is None else _first(path, _OPTIMIZERS)


def _first(path: str, names: Sequence[str]) -> str | None:
    places = (os.path.join(path, name) for name in names)
    return next((place for place in places if os.path.isfile(place)), None)


def read_plain(path: str, optimizer: str, choices: Choices, groups: Sequence[Sequence[str]] | None = None) -> Source:
    """Open the model and the optimizer.

    The parameters' names, in the order of the numbers, are `choices.param_order`, or the names in `groups`, whose sizes
    must be equal to the sizes of the groups in the file.
    """
    model, identity = _model_in(path)
    tree = {"model": model}
    if choices.only != "model":
        with reading(optimizer):
            archive = TorchArchive(optimizer)
            tree["optimizer"] = archive.content
            identity += archive.identity
            if groups is not None:
                choices = replace(choices, param_order=_in_order(optimizer, archive.content, groups))
    identity = hashlib.sha256(identity.encode()).hexdigest()
    with reading(path):
        return source_of_tree("safetensors", path, tree, choices, identity=identity)


def _model_in(path: str) -> tuple[Mapping[str, Any], str]:
    """Return the tensors of the model, and an identity of the files."""
    place = _first(path, _MODELS) or path
    if place.endswith((SUFFIX, INDEX_SUFFIX)):
        tensors = SafetensorsFiles(place)
        with tensors:
            return {name: found.tensor for name, found in tensors.tensors.items()}, tensors.digest
    with reading(place):
        if not place.endswith(".json"):
            archive = TorchArchive(place)
            return archive.content, archive.identity
        files = files_by_name(place)
        archives = {file: TorchArchive(file) for file in sorted(set(files.values()))}
        model = {name: archives[file].content[name] for name, file in files.items()}
        return model, "".join(archive.identity for archive in archives.values())


def _in_order(optimizer: str, content: Any, groups: Sequence[Sequence[str]]) -> list[str]:
    saved = [len(group["params"]) for group in content["param_groups"]] if is_optimizer_state(content) else []
    given = list(map(len, groups))
    if saved != given:
        raise ValueError(
            f"{optimizer} has parameter groups of {short(saved)} parameters, but the given optimizer has groups of "
            f"{given}: create it with the same groups"
        )
    return list(chain.from_iterable(groups))
