"""What is installed and handed on: a source distribution with all that belongs to it, a wheel, and its command."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

import fsdp

ROOT = Path(__file__).resolve().parent.parent
# Large packages that no signature of the package mentions. Reading these would take most of mypy's time.
UNREAD = (
    *("numpy", "sympy", "torch._decomp", "torch._dynamo", "torch._export", "torch._functorch", "torch._inductor"),
    *("torch._higher_order_ops", "torch._meta_registrations", "torch._prims", "torch._refs", "torch._subclasses"),
    *("torch.ao", "torch.distributions", "torch.export", "torch.fx", "torch.jit", "torch.onnx", "torch.package"),
)
# What is there in a checkout by use, and in no distribution.
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "*.pyc", "*.egg-info", "build", "dist", "runs")
absent = importlib.util.find_spec("setuptools") is None
pytestmark = pytest.mark.skipif(absent, reason="setuptools: not installed (it is in the extra `test`)")


class Distributions(NamedTuple):
    """Both kinds, built without a network: the wheel from the unpacked source distribution, as it is done elsewhere."""

    unpacked: Path
    wheel: Path

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return message_from_string(wheel.read(name).decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("built")
    # Elsewhere, since setuptools leaves folders of its own beside setup.py.
    shutil.copytree(ROOT, folder / "checkout", ignore=LEFT_BEHIND)
    for name in (".ci", ".github"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    archive = build("sdist", folder / "checkout", folder)
    with tarfile.open(archive) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    return Distributions(unpacked, build("wheel", unpacked, folder))


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_has_all_that_belongs_to_the_checkout(built: Distributions) -> None:
    checkout = built.unpacked.parent / "checkout"
    found = files(built.unpacked)
    ours = {name for name in files(checkout) if "egg-info" not in name}
    assert ours <= found, f"add to MANIFEST.in: {sorted(ours - found)}"
    for name in ("CHANGELOG.md", "tests/helpers/parity.py", "docs/usage.md", "benchmarks/step.py", "fsdp/py.typed"):
        assert name in found


def test_the_wheel_has_the_package_and_no_more(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {name for name in files(built.unpacked) if name.startswith("fsdp/")}
    assert names == package


def test_the_metadata_say_what_it_is(built: Distributions) -> None:
    metadata = built.metadata()
    assert (metadata["Name"], metadata["Version"]) == ("fsdp", fsdp.__version__)
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_extras_are_named_where_people_look_for_them(built: Distributions) -> None:
    extras = set(built.metadata().get_all("Provides-Extra", []))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("| extra |")[1].split("\n\n")[0]
    assert extras == set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:])))
    assert f"fsdp-{fsdp.__version__}-py3-none-any.whl" in readme


def test_the_description_has_no_link_that_leads_nowhere(built: Distributions) -> None:
    description = built.metadata().get_payload()
    assert isinstance(description, str)
    assert "The user guide: wrapping" in description
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert all(link.startswith("https://") for link in links), links


def test_the_readme_says_what_has_not_been_run_before_it_says_how_to_install() -> None:
    """As long as that is so."""
    reasons, install, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Install\n")
    assert install
    assert "More than one GPU is untested" in reasons


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy: not installed")
def test_types_are_known_to_users(built: Distributions, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        wheel.extractall(tmp_path)
    config = tmp_path / "mypy.ini"
    unread = ",".join(f"{name}.*" for name in UNREAD)
    # Without the bodies of our own functions, which `make lint` checks: users see the signatures.
    sections = (f"[mypy-{unread}]", "follow_imports = skip", "[mypy-fsdp.*]", "ignore_errors = True")
    config.write_text("\n".join(["[mypy]", *sections, ""]))
    # Torch's own types are read once, and kept: that takes most of the time.
    options = ["--strict", f"--config-file={config}", f"--cache-dir={ROOT / '.mypy_cache' / 'user'}"]
    command = [sys.executable, "-m", "mypy", *options]
    outside = dict(os.environ, MYPYPATH=str(tmp_path))
    script = tmp_path / "typed_user.py"
    text = (ROOT / "tests" / "data" / "typed_user.py").read_text(encoding="utf-8")
    script.write_text(f"{text}\nfsdp.trace(3)\n", encoding="utf-8")
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=outside, text=True, capture_output=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("typed_user.py") and "error:" in line]
    assert len(found) == 1, done.stdout + done.stderr
    assert 'Argument 1 to "trace" has incompatible type "int"' in found[0]
