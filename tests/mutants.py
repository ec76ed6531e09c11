"""Small mistakes, planted in the package one at a time, and the tests that should find them.

    python -m tests.mutants --count 60 --seed 1

draws 60 places in the engine, the state and the checkpoint modules (the same ones for the same seed and source),
changes each in a copy of the repository as a tired programmer might, runs the tests that concern the module until one
fails, and lists the mistakes that no test has found. Each of those is a hole in the tests, or a change that makes no
difference, which somebody has to look at. It takes about half a minute for a mistake.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# For patterns of modules, the tests that concern them: folders of tests, or files without `test_`. Random cases concern
# all of them.
CONCERNS = {
    "engine/layout": "engine/layout engine/boxes engine/flat_param fully_shard/training engine/clip",
    "engine/flat_param engine/orig_params engine/dtensor_params engine/unsharded_params engine/registration "
    "engine/grad_buffer": (
        "engine/flat_param engine/orig_params* training/orig_params fully_shard/training fully_shard/uses "
        "training/tensor_parallel engine/units engine/no_sync engine/changed_* fully_sharded_data_parallel/copies"
    ),
    "engine/handle*": (
        "engine/units engine/runtime engine/changed_* engine/no_sync training/training engine/orig_params* "
        "training/orig_params training/precision state_dict/summon_full_params engine/offload engine/different_values"
    ),
    "engine/unit engine/runtime engine/schedule engine/forward_hooks engine/usage engine/autograd": (
        "engine/runtime engine/schedule engine/units training/training engine/nested_calls engine/errors "
        "training/option_grid training/kinds_* engine/precision_eval fully_shard/uses engine/no_sync uneven"
    ),
    "engine/reduction engine/grad_clipping distributed/*": (
        "distributed/collectives engine/runtime engine/clip training/kinds_clip engine/hybrid distributed/hybrid_bytes "
        "tensor_parallel training/option_grid training/training distributed/comm_hook* training/comm_hooks"
    ),
    "engine/managed_params engine/shared_params engine/shard_module": (
        "training/kinds_* engine/append_shared_param engine/sync_module_states engine/ignored* engine/group_by "
        "fully_shard/uses wrap/wrap engine/units"
    ),
    "engine/verify engine/fingerprints": (
        "engine/errors engine/different_values engine/sync_module_states engine/hybrid distributed/starts_together"
    ),
    "state_dict/*": "state_dict tensor_parallel/state fully_shard/state checkpoint/formats/consolidate*",
    "optim_utils/*": "optim_utils checkpoint/optimizer",
    "checkpoint/*": "checkpoint",
    "state_dict_utils/*": "state_dict_utils",
}


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    def applied(self, source: str) -> str:
        lines = source.split("\n")
        text = lines[self.line - 1].encode()
        lines[self.line - 1] = (text[: self.start] + self.new.encode() + text[self.end :]).decode()
        return "\n".join(lines)

    def describe(self, source: str) -> str:
        old = source.split("\n")[self.line - 1].strip()
        new = self.applied(source).split("\n")[self.line - 1].strip()
        return f"{self.path}:{self.line}\n    - {old}\n    + {new}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change that is planted in a file; none in what only devices or messages need."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_message = isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arg)) or (
            isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "describe", "__del__")
        )
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        on_device = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.If)) and any(
            word in ast.unparse(node.test if isinstance(node, ast.If) else ast.Constant(node.name)).lower()
            for word in ("cuda", "pinned", "accelerator")
        )
        if is_message or is_typing or on_device or node in skipped:
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node not in skipped:
            yield from _changes(path, node)


COMPARED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}
CHAINED = {ast.And: ("and", "or"), ast.Or: ("or", "and")}


def _changes(path: Path, node: ast.AST) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(path, node.left, node.comparators[0], *COMPARED[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield from _between(path, node.left, node.right, *COMPUTED[type(node.op)])
    elif isinstance(node, ast.BoolOp):
        yield from _between(path, node.values[0], node.values[1], *CHAINED[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield Mutant(path, node.lineno, node.col_offset, node.operand.col_offset, "")
    elif isinstance(node, ast.Constant) and type(node.value) is bool and node.end_col_offset is not None:
        yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset, str(not node.value))
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.end_col_offset is not None:
        yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset, str(node.value + 1))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.lineno == node.end_lineno:
        yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset or 0, "pass")


def _between(path: Path, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
    if left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    line = (ROOT / path).read_text(encoding="utf-8").split("\n")[right.lineno - 1].encode()
    gap = line[left.end_col_offset : right.col_offset].decode()
    if gap.count(old) == 1:
        at = left.end_col_offset + gap.index(old)
        yield Mutant(path, right.lineno, at, at + len(old), new)


def modules_of(patterns: str) -> list[Path]:
    """The modules of one row of the table, without those that only say what a package has."""
    found: set[Path] = set()
    for pattern in patterns.split():
        paths = list((ROOT / "fsdp").glob(f"{pattern}.py"))
        if not paths:
            raise ValueError(f"no module is fsdp/{pattern}.py: say in CONCERNS of tests/mutants.py where it is now")
        found.update(paths)
    return [path.relative_to(ROOT) for path in sorted(found) if path.name != "__init__.py"]


def files_of(patterns: str, copy: Path, first: str = "") -> list[str]:
    """The files of tests of one row of the table, in a copy of the repository; those of the `first` name in front."""
    found: set[Path] = set()
    for pattern in patterns.split():
        room, _, name = pattern.rpartition("/")
        paths = list((copy / "tests" / pattern).glob("test_*.py")) or list(
            (copy / "tests" / room).glob(f"test_{name}.py")
        )
        if not paths:
            raise ValueError(f"no test is tests/{pattern}: say in CONCERNS of tests/mutants.py where it is now")
        found.update(paths)
    in_order = sorted(found, key=lambda path: (not path.stem.startswith(f"test_{first}"), path))
    return [str(path.relative_to(copy)) for path in in_order]


def drawn(count: int, seed: int) -> list[tuple[Mutant, str]]:
    """As many mutants from each row of the table, each with the tests that concern it."""
    rng, found = random.Random(seed), []
    rows = [(modules_of(patterns), tests) for patterns, tests in CONCERNS.items()]
    every = [([mutant for path in paths for mutant in mutants_of(path)], tests) for paths, tests in rows]
    for number in range(count):
        places, tests = every[number % len(every)]
        found.append((places.pop(rng.randrange(len(places))), tests))
    return found


PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]


def is_found(mutant: Mutant, tests: str, copy: Path, limit: float) -> str:
    """What found it: the first test that failed, or that the tests did not end; empty if nothing did."""
    original = (copy / mutant.path).read_text(encoding="utf-8")
    (copy / mutant.path).write_text(mutant.applied(original), encoding="utf-8")
    try:
        return first_failure([*files_of(tests, copy, mutant.path.stem), *files_of("fuzz", copy)], copy, limit)
    finally:
        (copy / mutant.path).write_text(original, encoding="utf-8")


def first_failure(names: list[str], copy: Path, limit: float) -> str:
    """Run files of tests in a copy of the repository until one fails; which one, or nothing."""
    own = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*PYTEST, "-k", "not planted", *names],
        cwd=copy,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{names[0]} and others did not end in {limit:.0f} s"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or output.splitlines()[-1:] or ["?"])[0][:150] if process.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for the tests of one mistake")
    parser.add_argument("--first", type=int, default=0, help="skip so many of those drawn")
    parser.add_argument("--list", action="store_true", help="show what is drawn, and run nothing")
    arguments = parser.parse_args()
    chosen = drawn(arguments.count, arguments.seed)[arguments.first :]
    shown = {mutant: mutant.describe((ROOT / mutant.path).read_text(encoding="utf-8")) for mutant, _ in chosen}
    if arguments.list:
        print("\n".join(shown.values()))
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
        missed = []
        for number, (mutant, tests) in enumerate(chosen, start=arguments.first):
            began = time.monotonic()
            found = is_found(mutant, tests, copy, arguments.limit)
            took = time.monotonic() - began
            outcome = f"{'found' if found else 'MISSED'} in {took:.0f} s"
            print(f"{number} {outcome}: {shown[mutant]}\n    {found}", flush=True)
            missed += [] if found else [mutant]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found ({1 - len(missed) / len(chosen):.0%})")
    print("".join(f"\nMISSED {shown[mutant]}" for mutant in missed))


if __name__ == "__main__":
    main()
