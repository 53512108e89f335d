"""Third-party kernels: parity with the oracle, and the error if they are not installed."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from nnxmoe.kernels import tokamax
from nnxmoe.kernels.tokamax import Tokamax
from tests.support.arrays import max_error
from tests.support.grouped import GROUPS, problem, product_and_gradients
from tests.support.running import PART_TOLERANCE
from tests.support.tiny import build_tiny, random_tokens


@pytest.mark.kernels
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", [name for name, (count, _) in GROUPS.items() if count])
def test_tokamax_equals_the_oracle(name: str, aligned: bool) -> None:
    """Forward and backward with the implementation that tokamax selects on this machine."""
    arrays = problem(name, jnp.float32)
    backend: Any = nnxmoe.Aligned(Tokamax(), 8) if aligned else Tokamax()
    wanted = product_and_gradients(nnxmoe.Masked(), *arrays)
    for a, b, what in zip(product_and_gradients(backend, *arrays), wanted, ("y", "d rows", "d kernel"), strict=True):
        assert a.dtype == b.dtype and max_error(a, b) < PART_TOLERANCE, what
        assert np.isfinite(a).all()


@pytest.mark.kernels
def test_model_with_tokamax() -> None:
    tokens = random_tokens(2, 9)
    ours = build_tiny("mixtral", nnxmoe.Strategy(matmul=Tokamax()))(tokens).logits
    assert max_error(ours, build_tiny("mixtral")(tokens).logits) < PART_TOLERANCE


def test_tokamax_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokamax, "installed", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'nnxmoe\[kernels\]'"):
        Tokamax()


@pytest.mark.parametrize(
    ("backend", "there", "wanted"),
    [
        ("cpu", True, "Blocked"),
        ("gpu", True, "Tokamax"),
        ("gpu", False, "Blocked"),
        ("tpu", True, "Tokamax"),
        ("tpu", False, "RaggedDot"),
    ],
)
def test_default_matmul_per_backend_and_its_explanation(
    monkeypatch: pytest.MonkeyPatch, backend: str, there: bool, wanted: str
) -> None:
    monkeypatch.setattr(tokamax, "installed", lambda: there)
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    strategy = nnxmoe.Strategy.auto()
    assert type(strategy.matmul).__name__ == wanted
    line = next(line for line in strategy.explain().splitlines() if line.startswith("matmul"))
    assert wanted in line and "not a default" not in line and line.split(": ", 1)[1]
