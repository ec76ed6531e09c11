"""`make release`, the citation, and the files by which a host runs tests and takes reports."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fsdp
from fsdp.__main__ import main as run_command
from tests.helpers.forking_torchrun import TORCHRUN
from tests.helpers.needs import needs
from tests.helpers.paths import ROOT

FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
VERSION = fsdp.__version__
has_git = pytest.mark.skipif(shutil.which("git") is None, reason="git: not installed")
LEFT_BEHIND = shutil.ignore_patterns(".git", ".*cache", "__pycache__", "*.egg-info", "build", "dist", "runs", ".venv*")


def release_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *command: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository that is ready for its release: what the checks read."""
    folder = tmp_path / "checkout"
    (folder / "fsdp").mkdir(parents=True)
    (folder / "fsdp" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2027-01-31\n- New.\n")
    (folder / "CITATION.cff").write_text("version: 1.2.0\ndate-released: 2027-01-31\n")
    git(folder, "init", "-q")
    _release(folder, "v1.2.0")
    return folder


def _release(folder: Path, tag: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Release")
    git(folder, "tag", "-f", tag)


@has_git
def test_a_checkout_that_is_ready_has_no_disagreements(checkout: Path) -> None:
    assert list(release_program().disagreements(checkout, "1.2.0")) == []


@has_git
@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("CHANGELOG.md", "\n## [1.2.0]", "- A fix.\n\n## [1.2.0]", "[Unreleased] has entries"),
        ("CHANGELOG.md", "[1.2.0]", "[1.1.0]", "first sections are to be [Unreleased] and [1.2.0]"),
        ("CHANGELOG.md", " - 2027-01-31", "", "[1.2.0] has no date"),
        ("CITATION.cff", "1.2.0", "1.1.0", "version is 1.1.0. Write: version: 1.2.0"),
        ("CITATION.cff", "01-31", "01-30", "Write: date-released: 2027-01-31"),
    ],
)
def test_files_that_disagree_are_named_with_the_remedy(
    checkout: Path, file: str, old: str, new: str, problem: str
) -> None:
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new))
    _release(checkout, "v1.2.0")
    (found,) = release_program().disagreements(checkout, "1.2.0")
    assert found.startswith(f"{file}: ")
    assert problem in found


@has_git
def test_a_missing_tag_and_a_change_that_is_not_committed_end_the_release(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "notes.txt").write_text("later")
    git(checkout, "tag", "-d", "v1.2.0")
    assert release_program().main(checkout) == 1
    said = capsys.readouterr().err
    assert "?? notes.txt" in said
    assert "git tag -a v1.2.0" in said


@has_git
@needs("setuptools")
def test_a_release_is_built_installed_and_tried_and_not_uploaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT, folder, ignore=LEFT_BEHIND)
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    before, _, _ = changelog.partition("\n## [Unreleased]\n")
    after = changelog[changelog.index(f"\n## [{VERSION}]") :]
    (folder / "CHANGELOG.md").write_text(f"{before}\n## [Unreleased]\n{after}", encoding="utf-8")
    git(folder, "init", "-q")
    _release(folder, f"v{VERSION}")
    program = release_program()
    run = program.run

    def run_on_one_rank(*command: Any, **options: Any) -> Any:
        """Replace what takes seconds: two ranks, which tests/docs/test_getting_started.py has; one here, forked.

        And the process for the last command, since `fsdp --version` has started one.
        """
        if "--nproc-per-node" in command:
            assert command[1:] == ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
            one = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "1")
            command = (command[0], "-c", TORCHRUN, *one, "train.py")
        if "verify" in command:
            with monkeypatch.context() as place, contextlib.redirect_stdout(io.StringIO()) as printed:
                place.chdir(options["cwd"])
                assert run_command([*command[1:]]) == 0
            return printed.getvalue()
        return run(*command, **options)

    monkeypatch.setattr(program, "run", run_on_one_rank)
    done = program.main(folder)
    said, errors = capsys.readouterr()
    assert done == 0, errors
    assert "the installed wheel trains; checkpoint (fsdp) is fine" in said
    built = sorted(path.name for path in (folder / "dist").iterdir())
    assert built == [f"fsdp-{VERSION}-py3-none-any.whl", f"fsdp-{VERSION}.tar.gz"]
    assert said.splitlines()[-1].startswith("To upload: python -m twine upload ")


# Files that a host of repositories reads


def parsed(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="yaml: not installed")
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_the_fields_that_a_host_requires(form: Path) -> None:
    content = parsed(form)
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names)
    assert all(field["attributes"]["label"] for field in fields)
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert all(field["attributes"]["options"] for field in fields if field["type"] == "dropdown")


def test_issue_forms_ask_for_the_output_of_the_command_that_merges_reports() -> None:
    for form in FORMS:
        (field,) = [field for field in parsed(form)["body"] if field.get("id") == "diagnose"]
        assert "FSDP_REPORTS=reports" in field["attributes"]["description"]
        assert "python -m fsdp diagnose reports" in field["attributes"]["description"]
    with pytest.raises(SystemExit, match=r"^0$"):
        run_command(["diagnose", "--help"])


def test_issue_forms_name_files_that_exist() -> None:
    named = {name for form in FORMS for name in re.findall(r"`(docs/[^`]+)`", form.read_text("utf-8"))}
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_scheduled_workflow_runs_all_tests_with_the_nightly_build_and_on_request() -> None:
    workflow = parsed(ROOT / ".github" / "workflows" / "scheduled.yml")
    starts = workflow.get("on", workflow.get(True))  # YAML 1.1 reads the key as a boolean
    assert starts["schedule"][0]["cron"]
    assert "workflow_dispatch" in starts
    test = workflow["jobs"]["test"]
    *_, everything, zoo, fuzz = [step.get("run") for step in test["steps"]]
    assert [everything, zoo] == ["make test CONSTRAINTS=", ".venv/bin/python -m tests.zoo"]
    assert fuzz == 'make test CONSTRAINTS= ARGS="tests/test_fuzz.py --fuzz-cases 500"'
    kinds = {each["torch"]: each for each in test["strategy"]["matrix"]["include"]}
    assert set(kinds) == {"oldest", "pinned", "newest", "nightly"}
    assert "nightly" in kinds["nightly"]["index"]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f'"torch>={kinds["oldest"]["install"].removeprefix("torch==").removesuffix(".*")}"' in setup
    assert f'python_requires=">={kinds["oldest"]["python"]}"' in setup


def test_the_citation_has_the_required_fields_and_the_version_of_the_package() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == VERSION
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{VERSION}] - {citation['date-released']}" in changelog
