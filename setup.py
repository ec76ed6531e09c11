"""Build and metadata of the `fsdp` distribution; tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    # Read as text: importing the package requires torch, which an isolated build does not have.
    source = (HERE / "fsdp" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('fsdp/__init__.py has no line of the form __version__ = "1.2.3".')
    return match.group(1)


def read_description() -> str:
    """Read the README and replace relative links and pictures, which do not work in a package index, by text."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"!?\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


INTEGRATIONS = {
    "transformers": ["transformers>=5", "accelerate>=1.10"],
    "accelerate": ["accelerate>=1.10"],
    "peft": ["peft>=0.18", "transformers>=5", "accelerate>=1.10"],
    "lightning": ["lightning>=2.6.4"],  # 2.6.2 and 2.6.3 were withdrawn
}

setup(
    name="fsdp",
    version=read_version(),
    description="Fully sharded data parallel training for PyTorch, with FairScale's interface",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="fsdp contributors",
    license_expression="BSD-3-Clause",
    keywords=["pytorch", "distributed", "fsdp", "fairscale", "zero", "sharding", "checkpoints"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["fsdp", "fsdp.*"]),
    package_data={"fsdp": ["py.typed"]},
    entry_points={"console_scripts": ["fsdp = fsdp.__main__:main"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "numpy"],
    extras_require={
        "train": ["tqdm"],
        "test": ["pytest>=8", "parameterized", "hypothesis", "safetensors", "setuptools>=77", "spmd_types>=0.3"],
        **INTEGRATIONS,  # for the modules of these names, and for tests, which skip without it
        # The reference imports all modules.
        "docs": [
            *("sphinx>=8", "myst-parser>=4", "furo", "sphinx-copybutton"),
            *(INTEGRATIONS["peft"] + INTEGRATIONS["lightning"]),
        ],
        "checksums": ["isal>=1.7"],  # faster ones for checkpoints
        "optimizers": ["pytorch-optimizer>=4", "torchao>=0.15"],  # that tests step by owners
        "quantised": ["bitsandbytes>=0.50"],  # that tests shard
        "dev": ["ruff", "mypy"],
    },
    zip_safe=False,
)
