"""The steps of a release up to the upload: `make release` checks, builds, installs and tries the distributions.

1. Version, changelog, citation and tag agree, and the checkout has no uncommitted change.
2. The source distribution is built from the commit, and the wheel from the unpacked source distribution.
3. `twine check` reads the metadata, if twine is installed.
4. The wheel is installed into a new environment, whose dependencies are those of this environment. The program of the
   README trains there on two ranks, and its checkpoint is verified.

The last line is the command for the upload. Nothing is uploaded.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"


class ReleaseError(Exception):
    """A step of the release has failed; the message names the file and the remedy."""


def main(root: Path = ROOT) -> int:
    """Run all steps, and return the exit code: 0, or 1 if a step has failed."""
    try:
        version = _read(root / "fsdp" / "__init__.py", r'^__version__ = "([^"]+)"$')
        found = list(disagreements(root, version))
        if found:
            raise ReleaseError("\n".join(f"- {problem}" for problem in found))
        say(f"1/4 version {version}: changelog, citation and tag agree")
        source, wheel = build(root, version)
        say(f"2/4 built {source.name} and {wheel.name}")
        say(f"3/4 {check(source, wheel)}")
        say(f"4/4 {try_out(root, wheel, version)}")
    except ReleaseError as error:
        print(f"The release is not ready:\n{error}", file=sys.stderr)
        return 1
    say(f"\nTo upload: python -m twine upload {source} {wheel} && git push origin v{version}")
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def disagreements(root: Path, version: str) -> Iterator[str]:
    """Yield all that is wrong before a release, with the remedies."""
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    if [name for name, _ in sections[:2]] != ["Unreleased", version]:
        yield f"CHANGELOG.md: the first sections are to be [Unreleased] and [{version}], as fsdp/__init__.py says."
    elif re.search(r"^- ", changelog.split("## [Unreleased]")[1].split("\n## ")[0], re.MULTILINE):
        yield f"CHANGELOG.md: [Unreleased] has entries. Move them to [{version}], or increase the version."
    date = dict(sections).get(version)
    if version in dict(sections) and not date:
        yield f"CHANGELOG.md: [{version}] has no date. Write: ## [{version}] - YYYY-MM-DD"
    for key, expected in (("version", version), ("date-released", date)):
        cited = _read(root / "CITATION.cff", rf"^{key}: (\S+)$")
        if expected and cited != expected:
            yield f"CITATION.cff: {key} is {cited}. Write: {key}: {expected}"
    if changed := run("git", "status", "--porcelain", cwd=root):
        yield f"The checkout has uncommitted changes. Commit or remove them: {', '.join(changed.splitlines())}"
    if f"v{version}" not in run("git", "tag", "--points-at", "HEAD", cwd=root).split():
        yield f"This commit has no tag v{version}. Create it: git tag -a v{version} -m v{version}"


def _read(path: Path, pattern: str) -> str:
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ReleaseError(f"{path.name} has no line of the form {pattern}")
    return match[1]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, and return its output; raise its output as an error if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} has failed with {done.returncode}:\n{done.stdout}")
    return done.stdout


def build(root: Path, version: str) -> tuple[Path, Path]:
    """Build both distributions into `dist`, from the files of the commit only."""
    if importlib.util.find_spec("setuptools") is None:
        raise ReleaseError("setuptools is not installed, which builds the distributions: pip install setuptools")
    target = root / "dist"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run("git", "archive", "--prefix=checkout/", f"--output={folder}/checkout.tar", "HEAD", cwd=root)
        _unpack(Path(folder, "checkout.tar"), folder)
        source = target / _built("sdist", Path(folder, "checkout"), target)
        _unpack(source, folder)
        wheel = target / _built("wheel", Path(folder, f"fsdp-{version}"), target)
    return source, wheel


def _unpack(archive: Path, folder: str) -> None:
    with tarfile.open(archive) as file:
        # Python 3.10.12 and 3.11.4 have the filter, and 3.14 has it as the default.
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        file.extractall(folder, **safely)


def _built(kind: str, source: Path, target: Path) -> str:
    return run(sys.executable, "-c", _BUILD.format(kind=kind), target, cwd=source).splitlines()[-1]


def check(*files: Path) -> str:
    """Check the metadata with twine, and return the result in words."""
    if importlib.util.find_spec("twine") is None:
        return "twine is not installed, so the metadata are not checked: pip install twine"
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=files[0].parent)
    return "twine accepts the metadata"


def try_out(root: Path, wheel: Path, version: str) -> str:
    """Install the wheel into a new environment, train the program of the README there, and verify its checkpoint."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    program = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "work")
        work.mkdir()
        (work / "train.py").write_text(program, encoding="utf-8")
        programs = _environment(Path(folder, "env"))
        install = ("pip", "--python", programs / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
        run(sys.executable, "-m", *install, cwd=work)
        place = run(programs / "python", "-c", "import fsdp; print(fsdp.__file__)", cwd=work, PYTHONPATH="").strip()
        if not place.startswith(folder):
            raise ReleaseError(f"The new environment imports fsdp from {place}, and not from the wheel.")
        if version not in (said := run(programs / "fsdp", "--version", cwd=work, PYTHONPATH="")):
            raise ReleaseError(f"The wheel is of version {version}, and its command prints: {said}")
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
        run(programs / "python", *launch, cwd=work, PYTHONPATH="", OMP_NUM_THREADS="1")
        saved = _read(root / "README.md", r'^fsdp\.save\("([^"]+)"')
        return "the installed wheel trains; " + run(programs / "fsdp", "verify", saved, cwd=work, PYTHONPATH="").strip()


def _environment(place: Path) -> Path:
    """Create an environment that also finds the packages of this one, and return the folder of its programs."""
    venv.create(place, symlinks=True)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(place / "bin" / "python", "-c", purelib, cwd=place).strip())
    # As a line of a .pth file, whose own .pth files are not read: an editable installation is not found.
    (packages / "of_the_builder.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return place / "bin"


if __name__ == "__main__":
    sys.exit(main())
