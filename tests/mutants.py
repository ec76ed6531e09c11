"""Small mistakes, planted in the package one at a time, and the tests that should find them.

    python -m tests.mutants --count 60 --seed 1

draws 60 places in the package (the same ones for the same seed and source), changes each in a copy of the repository as
a tired programmer might, runs the tests that concern the module until one fails, and lists the mistakes that no test
has found in time. Each of those is a hole in the tests, or a change that makes no difference, which somebody has to
look at. It takes about a minute for a mistake; with `--results FILE` a run that was interrupted goes on where it was.

    python -m tests.mutants --waits

takes back instead, one after the other, all that keeps in order what happens at once, on streams and between ranks:
waits, events, forks, and references by which memory lives long enough, wherever they are in the package. It runs the
tests on an accelerator, on a simulated one if there is no GPU, and on ranks whose messages leave late.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# For patterns of modules, the tests that concern them besides the file of tests of the same name: folders of tests, or
# files without `test_`, those first that are likely to fail first. A module belongs to the first row that names it.
CONCERNS = {
    "engine/boxes": "engine/boxes fully_shard/local_tensors layers/state_dict/tensor_part",
    "engine/layout engine/rows_layout": (
        "engine/layout engine/boxes engine/flat_param fully_shard/local_tensors layers/clip"
    ),
    "engine/flat_param engine/shard engine/user_attributes": (
        "engine/flat_param layers/clip_torch engine/gradient_elsewhere fully_sharded_data_parallel/copies engine/units"
    ),
    "engine/orig_params": (
        "engine/orig_params* engine/changed_shards training/orig_params fully_sharded_data_parallel/copies"
    ),
    "layers/annotated_params": "fully_shard/annotated_params",
    "layers/tensor_protocol": "training/bitsandbytes layers/packing",
    "layers/dtensor_params": "fully_shard/local_tensors fully_shard/tensor_parallel fully_shard/state fully_shard/uses",
    "engine/unsharded_params engine/presentation engine/originals engine/assigned_attributes": (
        "engine/flat_param engine/changed_parameters engine/changed_whole training/functional_call engine/units "
        "engine/written_in_forward fully_sharded_data_parallel/copies"
    ),
    "engine/grad_buffer engine/gradient_hooks": (
        "engine/no_sync engine/gradient_elsewhere engine/precision_gradients training/orig_params "
        "engine/parameter_hooks"
    ),
    "engine/handle engine/phase engine/shard_values": (
        "engine/flat_param engine/no_sync engine/changed_parameters layers/changed_dtype engine/orig_params_gradients "
        "fully_sharded_data_parallel/copies layers/state_dict/summon_full_params layers/different_values "
        "layers/offload "
        "engine/nested_calls training/functional_call uneven/used_on_some_ranks "
        "layers/state_dict/local_state"
    ),
    "engine/unit engine/runtime engine/policy engine/schedule engine/forward_hooks": (
        "engine/schedule engine/runtime engine/units engine/nested_calls engine/no_sync "
        "fully_shard/uses fully_shard/settings training/kinds_calls training/autograd_uses engine/errors uneven/cond "
        "engine/written_in_forward"
    ),
    "engine/usage engine/participation": "uneven/used_on_some_ranks training/autograd_uses training/kinds_frozen",
    "engine/autograd engine/trees": "training/autograd_uses training/kinds_calls engine/nested_calls engine/errors",
    "engine/reduction": "engine/runtime engine/hybrid distributed/hybrid_bytes training/comm_hooks",
    "layers/grad_clipping layers/torch_functions": (
        "layers/clip layers/clip_torch fully_sharded_data_parallel/restructured tensor_parallel/clip "
        "training/kinds_clip"
    ),
    "layers/managed_params engine/ignored layers/shard_module layers/foreign_names layers/options": (
        "engine/errors engine/ignored* layers/group_by fully_sharded_data_parallel/api fully_shard/errors "
        "fully_sharded_data_parallel/wrapped_again layers/sync_module_states fully_sharded_data_parallel/fsdp1_names "
        "tensor_parallel/errors fully_shard/starts"
    ),
    "layers/shared_params": "layers/append_shared_param training/kinds_tied fully_shard/uses engine/errors",
    "layers/module_states": "layers/sync_module_states",
    "layers/verify layers/first_use engine/checks layers/fingerprints": (
        "engine/errors layers/different_values layers/sync_module_states distributed/starts_together layers/ranks_apart"
    ),
    "layers/exact_norm": "layers/exact_norm layers/same_bits",
    "engine/observers": "layers/trace optim_utils/recording layers/nonfinite",
    "engine/precision": "engine/precision*",
    "layers/offload engine/storage layers/mapped_files": (
        "engine/memory layers/offload layers/mapped_files layers/offload_disk*"
    ),
    "engine/placeholder layers/module_overrides": (
        "engine/placeholder engine/errors layers/changed_dtype training/kinds_frozen fully_shard/errors "
        "fully_sharded_data_parallel/api"
    ),
    "layers/pipelines": "integrations/compat_fsdp2 fully_shard/methods",
    "layers/optimizer_hooks": "engine/errors optim_utils/errors engine/gradient_elsewhere",
    "layers/optimizer_mistakes": "engine/errors optim_utils/errors",
    "layers/optimizer_states": "optim_utils/errors optim_utils/state_of_ranks",
    "layers/sharding_strategy": "layers/sharding_strategy engine/hybrid",
    "layers/deferred_init": "layers/state_dict/meta* layers/state_dict/materialize* fully_shard/starts",
    "layers/extended_params": "fully_shard/pairs fully_shard/subclasses",
    "layers/flatten_params_wrapper layers/wrapper": "layers/flatten_params_wrapper layers/wrapper",
    "engine/kept_shard distributed/nested": "fully_shard/settings engine/placements_bytes engine/placements_training",
    "engine/placements": "engine/placements engine/placements_training",
    "layers/copying layers/merged_writes engine/names layers/state_requests": (
        "fully_sharded_data_parallel/copies engine/written_in_forward fully_sharded_data_parallel/pickle "
        "layers/state_dict/summon_forms layers/state_dict/state_dict layers/state_dict/state_dict_on_first"
    ),
    "distributed/collectives distributed/communicator distributed/messages": (
        "distributed/collectives distributed/devices distributed/comm_hook layers/ranks_apart distributed/own_groups"
    ),
    "distributed/block_codes layers/compression layers/quantized_params layers/quantized_reduce": (
        "distributed/block_codes layers/compression"
    ),
    "distributed/tree_sum distributed/micro_batch_sums": "distributed/tree_sum layers/same_bits",
    "distributed/dtensor": (
        "tensor_parallel/errors tensor_parallel/changes tensor_parallel/state fully_shard/tensor_parallel"
    ),
    "distributed/watchdog distributed/positions": (
        "distributed/watchdog distributed/paths distributed/causes_of_hangs layers/ranks_apart"
    ),
    "distributed/paths distributed/passes": "distributed/paths",
    "distributed/consensus": "distributed/agreement checkpoint/errors",
    "distributed/comm_hooks distributed/custom_collectives distributed/gather_extension distributed/devices": (
        "distributed/comm_hook* training/comm_hooks distributed/devices fully_shard/settings fully_shard/subclasses "
        "fully_shard/pairs"
    ),
    "layers/state_dict/full": (
        "layers/state_dict/state_dict layers/state_dict/changed_by_loading "
        "layers/state_dict/state_dict_on_first engine/ignored"
    ),
    "layers/state_dict/local": "layers/state_dict/local_state* checkpoint/formats/consolidate",
    "layers/state_dict/sharded": "layers/state_dict/sharded_state* layers/state_dict/meta*",
    "layers/state_dict/materialize": "layers/state_dict/materialize* layers/state_dict/meta*",
    "layers/state_dict/summon": "layers/state_dict/summon* fully_sharded_data_parallel/api",
    "layers/state_dict/redistribute": (
        "layers/state_dict/state_dict_on_first layers/state_dict/tensor_part "
        "layers/state_dict/changed_by_loading layers/state_dict/state_dict "
        "layers/state_dict/sharded_state checkpoint/load_safetensors"
    ),
    "optim_utils/grad_scaler": "optim_utils/grad_scaler optim_utils/torch_grad_scaler",
    "optim_utils/owned": "optim_utils/owned optim_utils/owned_state optim_utils/owned_kinds",
    "optim_utils/ownership": "optim_utils/ownership optim_utils/owned",
    "optim_utils/fingerprint optim_utils/recording": "optim_utils/fingerprint optim_utils/recording",
    "optim_utils/*": (
        "optim_utils/public_functions optim_utils/errors optim_utils/kinds optim_utils/resume optim_utils/fairscale "
        "optim_utils/another_nesting optim_utils/different_on_ranks optim_utils/reshard_optimizer* optim_utils/memory "
        "checkpoint/optimizer checkpoint/errors"
    ),
    "checkpoint/compare": "optim_utils/recording",
    "checkpoint/optim": "checkpoint/optimizer checkpoint/resume checkpoint/moments checkpoint/errors",
    "checkpoint/safetensors checkpoint/checksums": (
        "checkpoint/safetensors* checkpoint/load_safetensors* checkpoint/formats/hostile_files checkpoint/model "
        "checkpoint/disk"
    ),
    "checkpoint/cli": (
        "checkpoint/cli/inspect checkpoint/cli/verify checkpoint/cli/convert checkpoint/formats/hostile_files"
    ),
    "checkpoint/writer": "checkpoint/background checkpoint/model checkpoint/disk checkpoint/errors checkpoint/resume",
    "checkpoint/*": (
        "checkpoint/folders checkpoint/errors checkpoint/resume checkpoint/model checkpoint/disk "
        "checkpoint/formats/hostile_files checkpoint/load_safetensors checkpoint/optimizer checkpoint/killed"
    ),
    "checkpoint/formats/fairscale checkpoint/formats/consolidate checkpoint/formats/rank_files": (
        "checkpoint/formats/consolidate* checkpoint/formats/fairscale* checkpoint/formats/fsdp1* checkpoint/cli/legacy"
    ),
    "checkpoint/formats/dcp": "checkpoint/formats/dcp checkpoint/formats/hostile_files checkpoint/formats/round_trips",
    "checkpoint/formats/torch_file": "checkpoint/formats/torch* checkpoint/formats/hostile_files",
    "checkpoint/formats/*": (
        "checkpoint/formats/stitched checkpoint/cli/convert checkpoint/formats/round_trips checkpoint/formats/torch "
        "checkpoint/formats/fairscale checkpoint/formats/fsdp1 checkpoint/cli/legacy checkpoint/cli/verify "
        "checkpoint/formats/hostile_files"
    ),
    "weights/*": "weights/*",
    "state_dict_utils/stager state_dict_utils/host_memory": "state_dict_utils/stager* state_dict_utils/host",
    "state_dict_utils/*": (
        "state_dict_utils/public_functions state_dict_utils/flat state_dict_utils/gather state_dict_utils/broadcast "
        "state_dict_utils/distribute state_dict_utils/kinds"
    ),
}


# Tests that concern what keeps things in order in a module, in the place of those above.
ORDERED = {
    "checkpoint/writer": "checkpoint/folders",
    "compat/fairscale": "integrations/compat_fairscale_contract",
    "distributed/devices": (
        "distributed/accelerator_streams training/accelerator_uses state_dict_utils/host layers/accelerator_offload"
    ),
    "distributed/collectives distributed/communicator": (
        "distributed/accelerator_exchange engine/accelerator training/accelerator_uses distributed/collectives "
        "distributed/comm_hook*"
    ),
    "distributed/consensus": "layers/sync_module_states distributed/agreement",
    "distributed/comm_hooks": "fully_shard/accelerator",
    "distributed/custom_collectives": "fully_shard/accelerator engine/written_at_once",
    "distributed/imagined": "wrap/plan",
    "distributed/messages": "distributed/check_messages distributed/collectives distributed/recovery",
    "distributed/shared_memory": "distributed/shared_memory",
    "engine/gradient_hooks": "training/accelerator_uses",
    "engine/handle": "engine/written_at_once training/accelerator_uses layers/accelerator_offload",
    "layers/host_copy": "layers/host_copy",
    "layers/recovery": "distributed/recovery",
    "layers/standalone_handle": "layers/standalone_handle",
    "layers/trace": "layers/trace",
    "engine/runtime engine/unit": "engine/written_at_once training/accelerator_uses",
    "layers/merged_writes": "engine/written_in_forward engine/written_at_once",
    "fully_shard": "engine/written_at_once training/accelerator_uses",
    "lightning": "integrations/lightning_errors",
    "optim_utils/gather optim_utils/scatter": "engine/written_at_once optim_utils/public_functions optim_utils/memory",
    "layers/state_dict/redistribute layers/state_dict/summon": (
        "engine/written_at_once layers/state_dict/summon_forms layers/state_dict/state_dict_on_first "
        "training/accelerator_uses"
    ),
    "testing/memory_group testing/network": "testing/world testing/world_faults",
    "state_dict_utils/__init__ state_dict_utils/gather": (
        "state_dict_utils/host engine/written_at_once state_dict_utils/broadcast state_dict_utils/gather"
    ),
    "state_dict_utils/stager": "state_dict_utils/accelerator_stager",
    "uneven/messages": "uneven/join",
    "weights/*": "weights/stream",
    "wrap/checkpoint_wrapper": "wrap/checkpoint_wrapper_memory",
}
# The package under the checker of stream order, which needs no luck.
CHECKED = "testing/stream_order_messages testing/stream_order_package"
# Methods that wait, or say what is to be awaited; and functions that do.
WAITS = {"wait", "wait_event", "wait_stream", "synchronize", "record", "settle", "_settle", "protect"}
WAITING = {"finish", "finish_queued", "run_after"}
# What is queued inside of these goes beside what is queued next.
FORKS = {"fork", "_beside", "stream"}


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

    def describe(self) -> str:
        source = _source(self.path)
        old = source.split("\n")[self.line - 1].strip()
        new = self.applied(source).split("\n")[self.line - 1].strip()
        return f"{self.path}\n    - {old}\n    + {new}"


@cache
def _source(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every change that is planted in a file; none in what only devices or messages need."""
    tree = ast.parse(_source(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_message = isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arg)) or (
            isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "describe", "__del__")
        )
        is_guard = isinstance(node, ast.keyword) and node.arg == "strict"  # of zip: an error where a length is wrong
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        on_device = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.If)) and any(
            word in ast.unparse(node.test if isinstance(node, ast.If) else ast.Constant(node.name)).lower()
            for word in ("cuda", "pinned", "accelerator")
        )
        if is_message or is_guard or is_typing or on_device or node in skipped:
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node not in skipped:
            yield from _changes(path, node)


def waits_of(path: Path) -> Iterator[Mutant]:
    """Every wait, fork and reference in a file that keeps what happens at once in order, taken back.

    A wait whose result is used cannot be left out. A reference is kept for its own sake if nobody reads it.
    """
    tree = ast.parse(_source(path))
    known = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {"Generic[Tree]"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _waits(node.value):
            # What is awaited may begin in the same line, and begins all the same.
            begun = node.value.func.value if isinstance(node.value.func, ast.Attribute) else None
            yield _replaced(path, node, ast.unparse(begun) if isinstance(begun, ast.Call) else "pass")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "after":
            if len(node.args) == 1:
                yield _replaced(path, node, ast.unparse(node.func.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "after_use_of":
            yield _replaced(path, node, ast.unparse(node.args[1]))
        elif isinstance(node, ast.With):
            for call in (item.context_expr for item in node.items):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FORKS:
                    yield _replaced(path, call, '__import__("contextlib").nullcontext()')
        elif isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} <= known:
            yield from (_replaced(path, each, "pass") for each in _only_kept(node))


def _waits(call: ast.Call) -> bool:
    named = [call.func, *call.args]  # or a function that is called with one
    return any(isinstance(each, ast.Attribute) and each.attr in WAITS for each in named) or (
        isinstance(call.func, ast.Name) and call.func.id in WAITING
    )


def _only_kept(kind: ast.ClassDef) -> list[ast.stmt]:
    """Return where a class keeps what it was given, and never reads it: for as long as it lives, or the next one."""
    own = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    read = {node.attr for node in own if isinstance(node.ctx, ast.Load)}
    return [
        node
        for node in ast.walk(kind)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and any(target in own and target.attr.startswith("_") and target.attr not in read for target in node.targets)
    ]


def _modules() -> list[Path]:
    """Return all modules but those that say, to the checker of stream order, what others wait for."""
    found = [path.relative_to(ROOT) for path in sorted((ROOT / "fsdp").rglob("*.py"))]
    return [path for path in found if path.parent.name != "testing"]


def all_waits() -> list[tuple[Mutant, str]]:
    """What `waits_of` finds in the whole package, each with the tests that concern it."""
    tests = tests_by_module(CONCERNS) | tests_by_module(ORDERED)
    found = []
    for path in _modules():
        for mutant in waits_of(path):
            if path not in tests:
                raise ValueError(f"{path} waits for something: say in ORDERED of tests/mutants.py what tests that")
            found.append((mutant, f"{CHECKED} {tests[path]}"))
    return found


def _replaced(path: Path, node: ast.stmt | ast.expr, new: str) -> Mutant:
    return Mutant(path, node.lineno, node.col_offset, node.end_col_offset or 0, new)


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
    line = _source(path).split("\n")[right.lineno - 1].encode()
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
    return [path.relative_to(ROOT) for path in sorted(found) if path.name != "__init__.py" or "__init__" in patterns]


def files_of(patterns: str, copy: Path) -> list[str]:
    """The files of tests of one row of the table, in its order, in a copy of the repository."""
    found: dict[Path, None] = {}
    for pattern in patterns.split():
        room, _, name = pattern.rpartition("/")
        paths = list((copy / "tests" / pattern).glob("test_*.py")) or list(
            (copy / "tests" / room).glob(f"test_{name}.py")
        )
        if not paths:
            raise ValueError(f"no test is tests/{pattern}: say in CONCERNS of tests/mutants.py where it is now")
        found.update(dict.fromkeys(sorted(paths)))
    return [str(path.relative_to(copy)) for path in found]


def tests_by_module(table: dict[str, str]) -> dict[Path, str]:
    """The tests of each module, by the first row that names it."""
    found: dict[Path, str] = {}
    for patterns, tests in table.items():
        for path in modules_of(patterns):
            found.setdefault(path, tests)
    return found


def own_tests(path: Path) -> str:
    """The file of tests of a module's name, as in the table; empty if there is none."""
    place = path.relative_to("fsdp").with_suffix("")
    return str(place) if (ROOT / "tests" / place.parent / f"test_{place.name}.py").exists() else ""


def drawn(seed: int) -> list[tuple[Mutant, str]]:
    """All mistakes in an order that the seed gives, and edits elsewhere leave, each with the tests that concern it."""
    concerned = tests_by_module(CONCERNS)
    known = {path: f"{own_tests(path)} {concerned.get(path, '')}".strip() for path in modules_of("**/*")}
    found = [(mutant, tests) for path, tests in known.items() if tests for mutant in mutants_of(path)]
    return sorted(found, key=lambda one: hashlib.sha256(f"{seed} {one[0].describe()}".encode()).digest())


PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line"]


def first_failure(mutant: Mutant, tests: str, copy: Path, limit: float) -> str:
    """The first test that fails with a mistake, empty if none does within the limit."""
    original = (copy / mutant.path).read_text(encoding="utf-8")
    (copy / mutant.path).write_text(mutant.applied(original), encoding="utf-8")
    own = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*PYTEST, *files_of(tests, copy)],
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
        return ""
    finally:
        (copy / mutant.path).write_text(original, encoding="utf-8")
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or output.splitlines()[-1:] or ["?"])[0][:150] if process.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one mistake")
    parser.add_argument(
        "--results", type=Path, help="a file that gets each result at once; what is in it is not repeated"
    )
    parser.add_argument("--list", action="store_true", help="show what is drawn, and run nothing")
    parser.add_argument("--waits", action="store_true", help="take back what keeps an accelerator's streams in order")
    arguments = parser.parse_args()
    planted = drawn(arguments.seed)[: arguments.count]
    if arguments.waits:
        planted = all_waits()
    chosen: dict[str, tuple[Mutant, str]] = {}
    for mutant, tests in planted:
        shown = mutant.describe()
        chosen[f"{shown} (line {mutant.line})" if shown in chosen else shown] = (mutant, tests)
    if arguments.list:
        print("\n".join(chosen))
        return
    results: dict[str, str] = {}
    if arguments.results is not None and arguments.results.exists():
        results = dict(map(json.loads, arguments.results.read_text(encoding="utf-8").splitlines()))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
        for number, (shown, mistake) in enumerate(chosen.items()):
            if shown in results:
                continue
            began = time.monotonic()
            results[shown] = first_failure(*mistake, copy, arguments.limit)
            took = time.monotonic() - began
            print(f"{number} {'found' if results[shown] else 'MISSED'} in {took:.0f} s: {shown}\n    {results[shown]}")
            if arguments.results is not None:
                with arguments.results.open("a", encoding="utf-8") as file:
                    print(json.dumps([shown, results[shown]]), file=file)
    missed = [shown for shown in chosen if not results[shown]]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found ({1 - len(missed) / len(chosen):.0%})")
    print("".join(f"\nMISSED {shown}" for shown in missed))


if __name__ == "__main__":
    main()
