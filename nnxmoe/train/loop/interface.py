"""Types in the interface of `fit`: callbacks and their argument, the result and the errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.loop.definition import TrainState
from nnxmoe.train.loop.measured import Metrics


class NotFinite(ValueError):
    """Raised if gradients, or parameters to be saved, are NaN or infinite.

    The message names the parameters.
    """


@dataclasses.dataclass(frozen=True)
class Progress:
    """Argument of callbacks, created after each step.

    ``model()`` returns the current model. The next step donates its arrays. Copy the arrays that you
    need later (``jax.tree.map(jnp.copy, nnx.state(model))``), or save the model.
    """

    step: int
    steps: int
    metrics: Metrics
    load: np.ndarray  # [L, E]: fraction of each MoE layer's assignments per expert (see `Losses`)
    model: Callable[[], CausalLM]
    measured: frozenset[str] = frozenset()  # names of all metrics of the run, including later evaluations


class Callback(Protocol):
    """Called after each step. Returns True to stop the training.

    True is a bool of Python, NumPy or JAX, or an array with a single bool. Results of other types,
    such as the count returned by ``file.write``, are ignored.

    The next step waits for the callbacks, unless all of them have an attribute ``late = True``. Late
    callbacks run while the device computes the next step. They can read metrics but not call
    ``progress.model``. They can stop the training only after a step that is evaluated or saved.
    A callback that is a context manager is entered before the first step. It is exited after the last
    step, or when the training ends early.
    """

    def __call__(self, progress: Progress, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Fitted:
    """Result of `fit`.

    Attributes:
        model: The trained model.
        history: Metrics of each step of this call. If the run had already finished: the metrics of
            its last step, with a new evaluation if requested.
        state: The final state.
    """

    model: CausalLM
    history: list[Metrics]
    state: TrainState


def is_true(answer: Any) -> bool:
    """Check whether a callback returned a true boolean.

    Raises ValueError for an array of several booleans.
    """
    if getattr(answer, "dtype", None) is not None and str(answer.dtype).removeprefix("torch.") == "bool":
        if math.prod(answer.shape) != 1:
            raise ValueError(
                f"a callback returned booleans of the shape {list(answer.shape)}: return one, such as .all() of them"
            )
        return bool(answer)
    return answer is True


def unseen() -> CausalLM:
    """Raise ValueError: `Progress.model` for late callbacks."""
    raise ValueError("the next step has begun when a late callback is called: remove its attribute late to see a model")
