"""Environment variables that must be set before JAX is imported, and fixtures of the reference cases.

The package is imported inside the fixtures only, because the import hook that checks every annotation, shapes included,
is installed after this file is read: ``pytest --jaxtyping-packages=nnxmoe,tests.conftest.checked``.
"""

import gc
import itertools
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, runtime_checkable

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # parity in float32 also on accelerators
os.environ.setdefault("TQDM_DISABLE", "1")
# Compilation takes most of the time. These flags speed up code generation without changing XLA's fusions, buffers or
# collectives. The old loop emitters compile twice as fast as the MLIR emitters and exist up to jaxlib 0.10; an unknown
# flag ends the process. Set ``XLA_FLAGS=`` on the command line to test with default flags.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1{OLD_EMITTERS}"
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lowering is 20 % faster without stack traces
# Compilation cache shared by pytest workers and child processes, and kept for the next run.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / f"xla-{version('jaxlib')}-py{sys.version_info.minor}"
# Parameter sets per test in a run of the whole folder. All but the first are slow. CI runs the others by turns.
SETS = 3
NOT_BY_DEFAULT = {"slow", "program", "commands", "oracle", "kernels"}
NOT_BY_DEFAULT |= {"notebooks", "grain", "clients", "accelerators", "docs"}
PROGRAMS_LIMIT = 2 * 2**30  # bytes; code changes add programs, and JAX never evicts any
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

if TYPE_CHECKING:
    from tests.support.cases import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    help_of_sets = f"sets of parameters per test, 0: all (default: {SETS} where no file or test is named, else all)"
    help_of_sets += f"; up to {SETS}, those of default tests beside the first are slow"
    parser.addoption("--sets", type=int, help=help_of_sets)
    parser.addoption("--part", metavar="K/N", help="run every N-th test, from the K-th; the N parts are all tests")
    help_of_changed = "run the tests closest, by imports, to the files that differ from a Git revision"
    parser.addoption("--changed-since", metavar="REVISION", help=f"{help_of_changed}; with --part: both")
    parser.addoption("--at-most", type=int, default=200, help="maximum for --changed-since (default: 200)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "wrong_types: passes wrong types; skipped where annotations are checked")
    if hasattr(config, "workerinput"):
        config.option.sets = config.workerinput["sets"]
        return
    if config.option.sets is None:
        config.option.sets = SETS if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0
    if PROGRAMS.is_dir():
        if sum(file.stat().st_size for file in PROGRAMS.iterdir()) > PROGRAMS_LIMIT:
            shutil.rmtree(PROGRAMS)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker, whose command line names the folder of the tests, how many sets the main process takes."""
    node.workerinput["sets"] = node.config.option.sets


def pytest_collection_finish() -> None:
    """Freeze imported modules in the garbage collector; rescanning them while tracing takes 10 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.hookimpl(wrapper=True)  # before and after markers have selected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if config.getoption("jaxtyping_packages", None):
        for item in items:
            if item.get_closest_marker("wrong_types"):
                item.add_marker(pytest.mark.skip(reason="wrong types on purpose"))
    most = config.getoption("sets")
    chosen = slow_sets(config, items) if most and most <= SETS else set()
    yield
    if most:
        keep_sets(config, items, most, chosen)
    part, revision = config.getoption("part"), config.getoption("changed_since")
    if part or revision:
        selected = set(part_of(items, part)) if part else set()
        if revision:
            selected.update(affected_items(items, revision, config.getoption("at_most")))
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        items[:] = [item for item in items if item in selected]


def part_of(items: list[pytest.Item], part: str) -> list[pytest.Item]:
    """Return every N-th item, starting with the K-th, for the part K/N."""
    this, parts = map(int, part.split("/"))
    return [item for i, item in enumerate(items) if i % parts == this % parts]


def affected_items(items: list[pytest.Item], revision: str, count: int) -> list[pytest.Item]:
    """Return up to ``count`` items, round-robin over the changed files, closest items first."""
    from tests.support.import_graph import changed_files, distances

    # Random but fixed order of equally close items, so that one test file does not fill all places.
    shuffled = random.Random(0).sample(items, len(items))
    queues = []
    for path in changed_files(revision):
        distance_of = distances([path])
        reached = [item for item in shuffled if item.path in distance_of]
        queues.append(sorted(reached, key=lambda item: distance_of[item.path]))
    affected: dict[pytest.Item, None] = {}
    for items_of_round in itertools.zip_longest(*queues):
        affected.update(dict.fromkeys(item for item in items_of_round if item is not None))
    return list(affected)[:count]


def by_test(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Group items by test function. Each parameter set of a test marked `commands` or `every_set` is its own group."""
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        separate = item.get_closest_marker("commands") or item.get_closest_marker("every_set")
        name = item.nodeid if separate else item.nodeid.partition("[")[0]
        of_test.setdefault(name, []).append(item)
    return list(of_test.values())


def slow_sets(config: pytest.Config, items: list[pytest.Item]) -> set[int]:
    """Ids of ``SETS`` evenly spaced sets of parameters of each default test, all but the first of which become slow.

    The other sets of these tests are deselected."""
    plain = [item for item in items if all(mark.name not in NOT_BY_DEFAULT for mark in item.iter_markers())]
    chosen = set()
    for same in by_test(plain):
        for i in sorted({i * len(same) // SETS for i in range(SETS)}):
            chosen.add(id(same[i]))
            if i:
                same[i].add_marker(pytest.mark.slow)
    dropped = {id(item) for item in plain} - chosen
    config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
    items[:] = [item for item in items if id(item) not in dropped]
    return chosen


def keep_sets(config: pytest.Config, items: list[pytest.Item], most: int, also: set[int]) -> None:
    """Deselects all but ``most`` evenly spaced sets of parameters of each test, the first among them, and but the items
    whose ids are in ``also``."""
    tests = by_test([item for item in items if id(item) not in also])
    kept = also | {id(same[i * len(same) // most]) for same in tests for i in range(most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> "Iterator[None]":
    """Programs are dropped between modules, before the process has too many."""
    yield
    from tests.support.programs import drop_programs

    drop_programs()


def checked(function: Any) -> Any:
    """beartype that also accepts protocols.

    It skips functions annotated with ``Self``, which it supports only in decorated classes, and nested functions
    without annotated shapes: each call of the outer function would compile their checks anew, a quarter of the time.
    """
    from beartype import BeartypeConf, beartype
    from beartype.roar import BeartypeDecorHintPep673Exception

    hints = getattr(function, "__annotations__", {})
    if "<locals>" in function.__qualname__ and "jaxtyping" not in str(hints):
        return function
    for hint in hints.values():
        for part in (hint, *get_args(hint)):
            if getattr(part, "_is_protocol", False):
                runtime_checkable(part)
    try:
        return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)  # accept int for float
    except BeartypeDecorHintPep673Exception:
        return function


@pytest.fixture(scope="session")
def eight() -> "Iterator[Callable[..., Any]]":
    """``eight(function, *arguments)`` runs the function in a process with eight devices; a hang times out."""
    import concurrent.futures
    import multiprocessing

    from tests.support.programs import then_drop

    usual = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{usual or ''} --xla_force_host_platform_device_count=8"
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pool.submit(int).result(timeout=1200)  # the process has read its environment
    os.environ.pop("XLA_FLAGS") if usual is None else os.environ.update(XLA_FLAGS=usual)
    yield lambda function, *arguments: pool.submit(then_drop, function, *arguments).result(timeout=1200)
    pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture(scope="session")
def case() -> "Callable[[str], Case]":
    """``case(name)``: a reference case of ``tests/data/hf``, cached."""
    from tests.support.cases import load_case

    return load_case


@pytest.fixture(scope="session")
def case_model() -> Callable[..., Any]:
    """``case_model(name, strategy=ORACLE)``: the model of a case, cached per strategy; must not be modified."""
    from tests.support.cases import load_case_model

    return load_case_model
