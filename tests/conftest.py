"""The fixtures `ranks` and `accelerator_ranks`, and what the markers do. docs/contributing.md is the manual."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

# Before torch is imported here or in the workers: ranks share the cores, one thread each. This process and those that
# tests start have one as well, since sums have the order of threads, and each thread has memory of its own.
os.environ["OMP_NUM_THREADS"] = "1"
# Or asking whether there is a GPU would start CUDA in the server that workers are forked from, and break it
# in all of them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # files that need it are not collected then; the others run
    pass
else:
    # Nothing here is a timed test: an example may take long on a busy machine.
    hypothesis.settings.register_profile("without_deadline", deadline=None)
    hypothesis.settings.load_profile("without_deadline")

pytest.register_assert_rewrite("tests.helpers.parity", "tests.helpers.equality")

from tests import simulated  # noqa: E402
from tests.helpers import sessions  # noqa: E402
from tests.helpers.accelerator import IS_SIMULATED, AcceleratorRanks, has_accelerator  # noqa: E402
from tests.helpers.ranks import RankPool, Ranks, start_server  # noqa: E402
from tests.helpers.sessions import pytest_runtestloop  # noqa: E402, F401 - a hook

USE_RANKS = {"ranks", "accelerator_ranks", "lit_ranks"}  # the fixtures
LitRanks = Callable[[int], Ranks]
POOL = pytest.StashKey[RankPool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    sessions.pytest_addoption(parser)
    parser.addoption("--fuzz-cases", type=int, default=12, metavar="N", help="random cases of tests/test_fuzz.py")
    parser.addoption("--all-faults", action="store_true", help="in tests/test_faults.py, all of them and not a sample")
    parser.addoption(
        "--accelerator-backend", choices=("gloo", "nccl"), help="of accelerator_ranks(n), where a test asks for neither"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="the first of their seeds")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep garbage collections from walking what is imported and collected, which lives as long as the session.

    There is so much of it that each would cost tests in this process half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the server of ranks before sessions are forked, which share it: it imports for seconds."""
    uses_ranks = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if uses_ranks and not session.config.option.collectonly:
        folder = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        start_server(_preload(session), folder / "server.output")


def _preload(session: pytest.Session) -> list[str]:
    """Return the modules of tests that use ranks, after those that their files ask to be imported in the server."""
    items = [item for item in session.items if isinstance(item, pytest.Function)]
    asked = {name for item in items for name in getattr(item.module, "PRELOAD", ())}
    tests = {item.module.__name__ for item in items if not USE_RANKS.isdisjoint(item.fixturenames)}
    return sorted(asked) + sorted(name for name in tests if name.startswith("tests."))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("accelerator") and not has_accelerator():
        pytest.skip(f"needs a CUDA device, or a C++ compiler and torch {simulated.LEAST_TORCH} for a simulated one")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False here")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the marker `accelerator` that asks for no ranks in one: this process has no accelerator."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if pyfuncitem.get_closest_marker("accelerator") is None or "accelerator_ranks" in arguments:
        return None
    start: AcceleratorRanks = pyfuncitem._request.getfixturevalue("accelerator_ranks")
    start(1).run(pyfuncitem.function, **arguments)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what ranks printed; pytest shows report sections of failed tests only."""
    report = yield
    pool = item.config.stash.get(POOL, None)
    if pool is not None:
        report.sections += pool.take_printed()
    return report


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """`ranks(n).run(body, *args)` runs a module-level function in n processes with gloo as WORLD."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"), _preload(request.session))
    request.config.stash[POOL] = pool
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def lit_ranks(ranks: RankPool) -> LitRanks:
    """`ranks`, with the patience that the first import of Lightning in a worker may need on a busy machine."""
    return partial(ranks, timeout=240.0)


@pytest.fixture(scope="session")
def accelerator_ranks(request: pytest.FixtureRequest, ranks: RankPool) -> AcceleratorRanks:
    """As `ranks`, for bodies with tensors on the `ACCELERATOR`; mark the test `accelerator`.

    On CUDA, n ranks share the GPUs if there are fewer: over gloo, or over NCCL's sockets with `backend="nccl"`. The
    simulated device has collectives by NCCL's rules in both cases, and goes over gloo with `through_host=True`. With
    the option `--accelerator-backend`, tests that ask for neither a backend nor the host use that one.
    """

    if IS_SIMULATED:
        simulated.build()
    option = request.config.getoption("accelerator_backend")

    def start(world_size: int, *, backend: str | None = None, through_host: bool = False, **options: Any) -> Ranks:
        way = "gloo" if through_host else backend or option
        if IS_SIMULATED:
            through_host = through_host or (backend is None and option == "gloo")
            return ranks(world_size, backend=f"cpu:gloo,sim:{'gloo' if through_host else 'simulated'}", **options)
        if backend is None:
            # A name of its own even for gloo: CPU tests must not run in processes that hold a CUDA context.
            return ranks(world_size, backend=f"cpu:gloo,cuda:{way or 'gloo'}", **options)
        return ranks(world_size, backend="cpu:gloo,cuda:gloo" if backend == "gloo" else backend, **options)

    return start
