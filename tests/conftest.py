"""Settings that must be made before JAX starts, and the reference cases as fixtures.

The package is imported inside the fixtures only: an import hook that checks annotations
(``--jaxtyping-packages=nnxmoe,beartype.beartype``) is installed after this file is read.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # parity in float32 also on accelerators
os.environ.setdefault("TQDM_DISABLE", "1")

import pytest

if TYPE_CHECKING:
    from tests.helpers import Case


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
