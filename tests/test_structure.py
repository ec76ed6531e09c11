"""The rules that keep the package small, checked on its source: rooms, collectives, sizes, public names.

A file that does not exist yet is not missed; a file that is in no room fails, so that its place is decided
when it is added. The checks are functions of a syntax tree, and are first shown something they must find.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fsdp"

# From the top down: what is in a package imports from it and from packages below it. A name stands for a package, or
# for a module at the top; a package inside of another one may have a room of its own.
ROOMS: dict[str, set[str]] = {
    "command line": {"__main__"},
    "testing": {"testing"},
    "integrations": {"compat", "accelerate", "transformers", "lightning"},
    "uneven ranks": {"uneven"},
    "wrapping": {"wrap"},
    "front doors": {"fully_sharded_data_parallel", "fully_shard"},
    "layers that the front doors use": {"layers.on_demand"},
    "weights for other processes": {"weights"},
    "checkpoints": {"checkpoint"},
    "optimizer state": {"optim_utils"},
    "state": {"layers.state_dict", "state_dict_utils"},
    "layers around the engine": {"layers"},
    "engine": {"engine"},
    "communication": {"distributed"},
}
MAX_ENTRIES = 18
# Packages that say what they are for, and whose modules are imported from where they are.
INDEXES = {"distributed", "engine", "layers", "layers.state_dict", "uneven", "compat"}
# Of the integrations, those that are written as a user's own code would be.
CLIENTS = {"accelerate", "transformers", "lightning"}
# Modules with names that are loaded at their first use, in a table beside the same imports for type checkers.
LAZY = ("__init__", "layers.on_demand", "checkpoint.__init__", "optim_utils.__init__", "weights.__init__")
PUBLIC_PACKAGES = {"", "checkpoint", "state_dict_utils", "optim_utils", "weights", "wrap"}
# The files that one reads to know how the library works, listed in docs/architecture.md.
CENTRAL = re.compile(r"^\| `((?:engine|distributed)/\w+\.py)` \|", re.MULTILINE)
MAX_CENTRAL_FILES = 12  # what a step enters beyond them is measured by tests/engine/test_walk.py

MAX_MODULE_LINES = 800  # of the central ones; a class is never cut in two to stay below it
MAX_FUNCTION_LINES = 60  # of its body, without its docstring

# What moves data between ranks, as functions of torch.distributed; * stands for any ending.
COLLECTIVES = (
    "all_gather*, reduce_scatter*, all_reduce*, broadcast*, all_to_all*, gather*, scatter*, reduce, barrier, "
    "monitored_barrier, send*, recv*, isend, irecv, batch_isend_irecv, P2POp"
)
# The same as methods of a process group.
GROUP_METHODS = "allgather*, allreduce*, alltoall*, reduce_scatter_tensor_coalesced"
MAY_COMMUNICATE = {"distributed.collectives"}  # and there are no exceptions

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """One module of the package that another one imports."""

    module: str
    for_types_only: bool


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache  # nobody changes a tree
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def shown(path: Path) -> str:
    """A module as messages name it."""
    return str(path.relative_to(ROOT))


# Rooms


@cache
def imports(tree: ast.Module) -> set[Import]:
    """The modules of the package that are imported anywhere in the tree, in functions too."""
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    return {Import(name, id(node) in guarded) for node in ast.walk(tree) for name in _imported_by(node)}


def _imported_by(node: ast.AST) -> Iterator[str]:
    paths: list[str] = []
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = "fsdp" + (f".{node.module}" if node.module else "") if node.level else node.module or ""
        paths = [f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base for alias in node.names]
    yield from (path.partition(".")[2] for path in paths if path.startswith("fsdp."))


def _is_module(path: str) -> bool:
    place = ROOT / path.replace(".", "/")
    return place.with_suffix(".py").is_file() or place.is_dir()


def name_of(path: Path) -> str:
    """The name by which other modules import it, without the package's: `engine.unit`, or `checkpoint`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def height(module: str) -> int:
    """The room of a module, 0 at the bottom; `__init__` is above all rooms."""
    parts = module.split(".")
    heights = {name: number for number, members in enumerate(reversed(ROOMS.values())) for name in members}
    for length in range(len(parts), 0, -1):
        if (room := ".".join(parts[:length])) in heights:
            return heights[room]
    return len(ROOMS)


def upward(module: str, tree: ast.Module) -> list[str]:
    own = height(module)
    return sorted(name for name, _ in imports(tree) if height(name) > own)


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a ring, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for below in sorted(graph.get(name, ())):
            if found := visit(below, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def test_upward_imports_and_cycles_are_found() -> None:
    inside = "def f():\n    from fsdp.layers.state_dict.full import b"
    tree = ast.parse(f"import torch\nfrom .engine.runtime import A\n{inside}")
    assert imports(tree) == {Import("engine.runtime", False), Import("layers.state_dict.full", False)}
    assert upward("distributed.devices", tree) == ["engine.runtime", "layers.state_dict.full"]
    assert upward("engine.unit", tree) == ["layers.state_dict.full"]
    assert upward("layers.state_dict.full", tree) == []
    assert upward("wrap", tree) == []
    assert imports(ast.parse("from fsdp import __version__")) == set()
    assert imports(ast.parse("from fsdp import checkpoint\nfrom fsdp.checkpoint import writer, save")) == {
        Import("checkpoint", False),
        Import("checkpoint.writer", False),
    }
    assert upward("engine.unit", ast.parse("import fsdp.compat.fairscale")) == ["compat.fairscale"]
    assert imports(ast.parse("if TYPE_CHECKING:\n    from fsdp.engine import unit")) == {Import("engine.unit", True)}
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_every_entry_at_the_top_has_a_room() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries == {"__init__"} | {name.split(".")[0] for name in set().union(*ROOMS.values())}, (
        "decide which room an entry of fsdp/ belongs to and add it to ROOMS, here and in docs/architecture.md"
    )
    assert len(entries) <= MAX_ENTRIES


def test_imports_go_down_the_list_of_rooms() -> None:
    found = {name_of(path): upward(name_of(path), parse(path)) for path in sources()}
    wrong = {name: above for name, above in found.items() if above}
    assert not wrong, f"these modules import others, which stand above them in ROOMS: {wrong}"


def test_no_modules_import_each_other_not_even_for_types() -> None:
    graph = {name_of(path): {name for name, _ in imports(parse(path))} for path in sources() if name_of(path)}
    assert not cycle(graph), f"a ring of imports: {' -> '.join(cycle(graph))}"


@pytest.mark.parametrize("path", [path for path in sources() if name_of(path).split(".")[0] in CLIENTS], ids=str)
def test_integrations_show_that_the_public_names_are_enough(path: Path) -> None:
    own = name_of(path).split(".")[0]
    used = {name for name, _ in imports(parse(path)) if name.split(".")[0] != own}
    private = used - PUBLIC_PACKAGES - CLIENTS
    assert not private, f"fsdp/{path.relative_to(PACKAGE)} uses {', '.join(private)}"


@pytest.mark.parametrize("folder", sorted(INDEXES))
def test_a_folder_says_what_it_is_for_and_imports_nothing(folder: str) -> None:
    tree = parse(PACKAGE / folder.replace(".", "/") / "__init__.py")
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1, f"fsdp/{folder}/__init__.py: import what is needed from the module that has it"


@pytest.mark.parametrize("name", ["layout"])
def test_the_layout_knows_nothing_of_ranks_that_talk(name: str) -> None:
    names = names_from_torch(parse(PACKAGE / "engine" / f"{name}.py"))
    assert "distributed" not in {part for name in names for part in name.split(".")}


# Collectives


@cache
def names_from_torch(tree: ast.Module) -> set[str]:
    """Every dotted name of torch that is mentioned, whatever it is called here: `dist.barrier` in full."""
    local: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # `import torch.distributed` binds `torch`, which needs no translation.
            local |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            local |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found = imported | set(local.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            found.add(".".join([local.get(first, first), *rest]))
    return {name for name in found if name.split(".")[0] == "torch"}


def collectives(tree: ast.Module) -> list[str]:
    functions = {
        name for name in names_from_torch(tree) if name.startswith("torch.distributed.") and _listed(COLLECTIVES, name)
    }
    methods = {
        f".{node.attr}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and _listed(GROUP_METHODS, node.attr)
    }
    return sorted(functions | methods)


def _listed(patterns: str, name: str) -> bool:
    last = name.split(".")[-1].lstrip("_")
    return any(re.fullmatch(pattern.replace("*", r"\w*"), last) for pattern in patterns.split(", "))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch.distributed as dist\ndist.all_reduce(x)", ["torch.distributed.all_reduce"]),
        ("import torch\ntorch.distributed.isend(x, 0)", ["torch.distributed.isend"]),
        ("from torch import distributed as d\nf = d._all_gather_x", ["torch.distributed._all_gather_x"]),
        ("from torch.distributed import barrier as wait", ["torch.distributed.barrier"]),
        ("from torch.distributed import nn\nnn.f.broadcast(x)", ["torch.distributed.nn.f.broadcast"]),
        ("group._allgather_base(a, b)", ["._allgather_base()"]),
        ("import torch.distributed as dist\ndist.get_rank(dist.ReduceOp.SUM)\ncomm.all_reduce(x)", []),
        ("torch.gather(x, 0, y)\nx.scatter(0, y)", []),
    ],
)
def test_collectives_are_found_under_any_name(code: str, found: list[str]) -> None:
    assert collectives(ast.parse(code)) == found


def test_only_comm_talks_to_other_ranks() -> None:
    used = {shown(path): collectives(parse(path)) for path in sources() if name_of(path) not in MAY_COMMUNICATE}
    wrong = {path: names for path, names in used.items() if names}
    assert not wrong, f"go through fsdp.distributed: {wrong}"


# Devices

ACCELERATORS = "cuda", "xpu", "mps", "mtia", "npu", "hpu", "privateuseone"


def accelerators(tree: ast.Module) -> list[str]:
    """Return what names a type of accelerator: strings, torch's modules for them, attributes of tensors and modules."""
    names = {name for name in names_from_torch(tree) if name.split(".")[1:2] and name.split(".")[1] in ACCELERATORS}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked = {f".{each}" for each in attributes if each.removeprefix("is_") in ACCELERATORS}
    return sorted(names | {text for text in texts if text.split(":")[0] in ACCELERATORS} | asked)


def test_names_of_accelerators_are_found() -> None:
    assert accelerators(ast.parse("import torch\ntorch.cuda.Stream()")) == [".cuda", "torch.cuda", "torch.cuda.Stream"]
    assert accelerators(ast.parse("from torch import xpu")) == ["torch.xpu"]
    assert accelerators(ast.parse('device = "cuda:0" if tensor.is_cuda else "npu"')) == [".is_cuda", "cuda:0", "npu"]
    assert accelerators(ast.parse('"""CUDA queues."""\ndevice = "cpu"')) == []


def may_name_accelerators(path: Path) -> bool:
    """The seam, and what stands in the place of torch's own names in tests of users."""
    return name_of(path) == "distributed.devices" or path.parent.name == "testing"


def test_one_module_names_accelerators() -> None:
    used = {shown(path): accelerators(parse(path)) for path in sources() if not may_name_accelerators(path)}
    wrong = {path: names for path, names in used.items() if names}
    assert not wrong, f"ask fsdp.distributed.devices: {wrong}"


# What torch makes on the default device of the user (`torch.set_default_device`), unless it is told where.
NEW_TENSORS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "tril_indices", "triu_indices", "zeros"),
}


def nowhere(tree: ast.Module) -> list[str]:
    """Return the calls that make tensors without naming their device."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in NEW_TENSORS}]
    return [ast.unparse(call) for call in made if not {"device", None} & {keyword.arg for keyword in call.keywords}]


def test_tensors_on_a_default_device_are_found() -> None:
    assert nowhere(ast.parse("torch.empty(3)\ntorch.zeros(3, device=HOST)")) == ["torch.empty(3)"]
    assert nowhere(ast.parse("torch.zeros_like(x)\nx.new_empty(3)\ntorch.full((), 1, **options)")) == []


def test_new_tensors_name_their_device() -> None:
    found = {shown(path): calls for path in sources() if (calls := nowhere(parse(path)))}
    assert not found, f"pass device=, since users set default devices: {found}"


# Words

_HALF_SENTENCE = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|When|Of|As|For|The other)\b")


def half_sentences(tree: ast.Module) -> list[str]:
    """Return the first lines of docstrings that begin as half a sentence, without a subject or a verb."""
    documented = (node for node in ast.walk(tree) if isinstance(node, (Function, ast.ClassDef, ast.Module)))
    docstrings = (ast.get_docstring(node) or "" for node in documented)
    return [docstring.splitlines()[0] for docstring in docstrings if _HALF_SENTENCE.match(docstring)]


def test_a_half_sentence_is_found() -> None:
    tree = ast.parse('"""What users want."""\ndef f():\n    """Return it."""\nclass A:\n    """Whose it is."""')
    assert half_sentences(tree) == ["What users want.", "Whose it is."]


def test_docstrings_are_sentences() -> None:
    found = {shown(path): half for path in sources() if (half := half_sentences(parse(path)))}
    assert not found, f"docstrings that begin without a verb or a subject: {found}"


# Sizes and asserts


def function_lines(function: Function) -> int:
    length = (function.end_lineno or 0) - function.body[0].lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        length -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return length


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def test_a_function_is_measured_without_its_signature_and_docstring() -> None:
    tree = ast.parse('@decorated\ndef f(\n    a,\n):\n    """One.\n\n    Two.\n    """\n    b = a\n    return b')
    assert [function_lines(function) for function in functions(tree)] == [2]


def test_a_module_can_be_read_in_one_sitting() -> None:
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = {path: length for path, length in lengths.items() if length > MAX_MODULE_LINES}
    assert not long, f"modules longer than {MAX_MODULE_LINES} lines: {long}"


def test_the_central_files_are_listed() -> None:
    listed = CENTRAL.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert 8 <= len(listed) <= MAX_CENTRAL_FILES
    assert all((PACKAGE / file).is_file() for file in listed)


def test_a_function_fits_on_a_screen() -> None:
    lengths = {
        f"{shown(path)}:{node.lineno} {node.name}": function_lines(node)
        for path in sources()
        for node in functions(parse(path))
    }
    long = {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}
    assert not long, f"functions longer than {MAX_FUNCTION_LINES} lines: {long}"


def test_errors_are_raised_and_not_asserted() -> None:
    found = [
        f"{shown(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Assert)
    ]
    assert not found, f"{found}: raise an error, which `python -O` keeps"


# Public names


def public_names() -> dict[str, str]:
    """What `fsdp/__init__.py` re-exports: the name, and the module that it comes from."""
    init = PACKAGE / "__init__.py"
    own = [node for node in statements_of(parse(init)) if isinstance(node, ast.ImportFrom)]
    froms = [node for node in own if node.module not in ("__future__", "typing", "fsdp.layers.lazy")]
    return {alias.name: module for node in froms for alias, module in zip(node.names, _imported_by(node), strict=True)}


def statements_of(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module, with those for type checkers."""
    guarded = (node.body if isinstance(node, ast.If) else [node] for node in tree.body)
    return [statement for body in guarded for statement in body]


def definition(name: str, module: str) -> ast.stmt | ast.Module | None:
    """The statement that defines a name, through re-exports, or the module of that name."""
    place = PACKAGE / module.replace(".", "/")
    body = statements_of(parse(place / "__init__.py" if place.is_dir() else place.with_suffix(".py")))
    for node in reversed(body):  # the last one of overloads is the function itself
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return next((definition(name, below) for below in _imported_by(node)), None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in ast.unparse(node).split("=")[0]:
            return node
    return parse(place / "__init__.py") if module == name and place.is_dir() else None


def documentation() -> str:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())


def test_the_package_is_nothing_but_its_public_names() -> None:
    for node in statements_of(parse(PACKAGE / "__init__.py")):
        code = ast.unparse(node).replace("(__getattr__, __dir__)", "__getattr__, __dir__")  # as Python 3.10 has it
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_name = isinstance(node, ast.ImportFrom) or code.startswith(
            ("__version__ =", "__all__ =", "_LAYERS =", "__getattr__, __dir__ = lazily(")
        )
        assert docstring or is_name, f"fsdp/__init__.py is no place for: {code}"
        if code.startswith("__all__ ="):
            assert sorted(ast.literal_eval(code.partition("=")[2].strip())) == sorted(public_names())


@pytest.mark.parametrize("name", LAZY)
def test_names_that_load_at_first_use_are_those_that_type_checkers_see(name: str) -> None:
    tree = parse((PACKAGE / name.replace(".", "/")).with_suffix(".py"))
    table = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_LAYERS", "_HOMES")
    )
    loaded = {(f"{home}.{each}" if each else home) for home, names in table.items() for each in names.split() or [""]}
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        f"{node.module}.{alias.name}"
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert loaded == seen


def test_public_names_have_docstrings() -> None:
    for name, module in public_names().items():
        node = definition(name, module)
        assert node is not None, f"fsdp/{module}.py defines no {name}"
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Module)):
            assert ast.get_docstring(node), f"fsdp/{module}.py: {name} has no docstring"


def test_public_names_are_documented() -> None:
    text = documentation()
    missing = [name for name in public_names() if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    assert not missing, "these names are mentioned neither in README.md nor in docs/*.md"
