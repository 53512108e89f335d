"""Settings that must be made before JAX starts, and the reference cases as fixtures.

The package is imported inside the fixtures only, because the import hook that checks every annotation, shapes included,
is installed after this file is read: ``pytest --jaxtyping-packages=nnxmoe,tests.conftest.checked``.
"""

import gc
import os
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
# Compiling takes most of the time. These flags shorten the step from HLO to machine code; XLA's decisions (fusions,
# buffers, collectives) stay the same. Emitters of fusions by loops compile twice as fast as those by MLIR, and exist up
# to jaxlib 0.10; an unknown flag ends the process. ``XLA_FLAGS=`` on the command line: code as a user's.
OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1{OLD_EMITTERS}"
)
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lowering is a fifth faster without stack traces
# Compiled programs are shared by the workers and the processes that tests start, and are kept for the next run.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / f"xla-{version('jaxlib')}-py{sys.version_info.minor}"
PROGRAMS_LIMIT = 2 * 2**30  # bytes; each change of the package adds programs, and JAX deletes none by itself
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(PROGRAMS))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

if TYPE_CHECKING:
    from tests.support.cases import Case


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "wrong_types: passes wrong types; skipped where annotations are checked")
    if not hasattr(config, "workerinput") and PROGRAMS.is_dir():  # the first process only, before any other starts
        if sum(file.stat().st_size for file in PROGRAMS.iterdir()) > PROGRAMS_LIMIT:
            shutil.rmtree(PROGRAMS)


def pytest_collection_finish() -> None:
    """Tracing allocates many objects; scanning the imported modules again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("jaxtyping_packages", None):
        for item in items:
            if item.get_closest_marker("wrong_types"):
                item.add_marker(pytest.mark.skip(reason="wrong types on purpose"))


def checked(function: Any) -> Any:
    """beartype that also accepts protocols, and skips functions annotated with ``Self``, which it supports only in
    decorated classes."""
    from beartype import BeartypeConf, beartype
    from beartype.roar import BeartypeDecorHintPep673Exception

    for hint in getattr(function, "__annotations__", {}).values():
        for part in (hint, *get_args(hint)):
            if getattr(part, "_is_protocol", False):
                runtime_checkable(part)
    try:
        return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)  # an int will do for a float
    except BeartypeDecorHintPep673Exception:
        return function


@pytest.fixture(scope="session")
def eight() -> "Iterator[Callable[..., Any]]":
    """``eight(function, *arguments)`` runs the function in a process with eight devices; a hang times out."""
    import concurrent.futures
    import multiprocessing

    usual = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{usual or ''} --xla_force_host_platform_device_count=8"
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    pool.submit(int).result(timeout=120)  # the process has read its environment
    os.environ.pop("XLA_FLAGS") if usual is None else os.environ.update(XLA_FLAGS=usual)
    yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=300)
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
