"""Types in the interface of `fit`: callbacks, their argument, the result and errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.loop.definition import TrainState
from nnxmoe.train.loop.measured import Metrics


class NotFinite(ValueError):
    """Raised if gradients or updated parameters are NaN or infinite.

    The message names the parameters.
    """


@dataclasses.dataclass(frozen=True)
class Progress:
    """Argument of callbacks, created after each step.

    ``model()`` returns the current model. The next step donates the model's arrays. To use them later,
    save the model or copy its arrays (``jax.tree.map(jnp.copy, nnx.state(model))``).
    """

    step: int
    steps: int
    metrics: Metrics
    load: np.ndarray  # [L, E]: fraction of each MoE layer's assignments per expert (see `Losses`)
    model: Callable[[], CausalLM]
    measured: frozenset[str] = frozenset()  # names of all metrics of the run, including later evaluations


class Callback(Protocol):
    """Function called after each step. It may return True to stop the training.

    True may be a Python, NumPy or JAX bool, or an array with a single bool. Results of other types,
    such as the count returned by ``file.write``, are ignored.

    The next step waits for the callbacks, unless all callbacks have an attribute ``late = True``. Late
    callbacks run while the device computes the next step. They can read metrics but cannot call
    ``progress.model``. They can stop the training only after a step that is evaluated or saved.

    If a callback is a context manager, it is entered before the first step. It is exited after the last
    step, or when training ends early.
    """

    def __call__(self, progress: Progress, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Result of `fit`.

    Attributes:
        model: The trained model.
        history: Metrics of each step of this call. If the run had already finished, the metrics of
            its last step, with a new evaluation if requested.
        state: The training state after the last step.
    """

    model: CausalLM
    history: list[Metrics]
    state: TrainState


def is_true(result: Any) -> bool:
    """Check whether a callback returned a true boolean.

    Raises ValueError if the result is an array of several booleans.
    """
    if getattr(result, "dtype", None) is not None and str(result.dtype).removeprefix("torch.") == "bool":
        if math.prod(result.shape) != 1:
            raise ValueError(
                f"a callback returned booleans of the shape {list(result.shape)}: return one boolean, "
                "such as array.all()"
            )
        return bool(result)
    return result is True


def unseen() -> CausalLM:
    """Raise ValueError. Used as `Progress.model` for late callbacks."""
    raise ValueError(
        "a late callback is called after the next step has started: remove its `late` attribute to read the model"
    )
