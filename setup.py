"""Build and metadata of the `fsdp` distribution; tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    # Read as text: importing the package would need torch, which an isolated build does not have.
    source = (HERE / "fsdp" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('fsdp/_version.py has no line of the form __version__ = "1.2.3".')
    return match.group(1)


setup(
    name="fsdp",
    version=read_version(),
    description="Fully sharded data parallel training for PyTorch, with FairScale's interface",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="fsdp contributors",
    license="BSD-3-Clause",
    packages=find_packages(include=["fsdp", "fsdp.*"]),
    package_data={"fsdp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "numpy"],
    extras_require={
        "train": ["tqdm"],
        "test": ["pytest>=8", "parameterized", "hypothesis", "safetensors"],
        "lightning": ["lightning>=2.6.4"],  # for fsdp.lightning; 2.6.2 and 2.6.3 were withdrawn
        # For the modules of these names, and what some tests compare with; they skip without it.
        "transformers": ["transformers>=5", "accelerate>=1.10"],
        "accelerate": ["accelerate>=1.10"],
        "dev": ["ruff", "mypy"],
    },
    zip_safe=False,
)
