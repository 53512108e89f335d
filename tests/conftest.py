"""Settings that must be made before JAX starts, and the reference cases as fixtures.

The package is imported inside the fixtures only: an import hook that checks every annotation, shapes included, is
installed after this file is read: ``pytest --jaxtyping-packages=nnxmoe,tests.conftest.checked``.
"""

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, get_args, runtime_checkable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # parity in float32 also on accelerators
os.environ.setdefault("TQDM_DISABLE", "1")
# Machine code is made sooner; what XLA decides (fusions, buffers, collectives) is the same. ``XLA_FLAGS=``: as usual
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import pytest

if TYPE_CHECKING:
    from tests.helpers import Case


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "wrong_types: passes wrong types; skipped where annotations are checked")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("jaxtyping_packages", None):
        for item in items:
            if item.get_closest_marker("wrong_types"):
                item.add_marker(pytest.mark.skip(reason="wrong types on purpose"))


def checked(function: Any) -> Any:
    """beartype, but it also takes protocols, and leaves annotations with ``Self`` alone, which it refuses outside of
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


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that a module compiles again and again, also in processes that it starts, are kept on the disk."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    folder = str(tmp_path_factory.mktemp("programs"))
    settings = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0}
    usual = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        compilation_cache.reset_cache()
        yield
    for name, value in usual.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def eight() -> "Iterator[Callable[..., Any]]":
    """``eight(function, *arguments)``: its result in a process that has eight devices; a hang fails after a while."""
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
    """``case(name)``: a reference case of ``tests/data/hf``; read once."""
    from tests.helpers import load_case

    return load_case


@pytest.fixture(scope="session")
def case_model() -> Callable[..., Any]:
    """``case_model(name, strategy=ORACLE)``: the model of a case; loaded once for each strategy, not to be changed."""
    from tests.helpers import load_case_model

    return load_case_model
