"""Types in the interface of `fit`: arguments of callbacks, the callback protocol, the result and errors."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.train.loop.definition import TrainState
from nnxmoe.train.loop.measured import Metrics


class NotFinite(ValueError):
    """Raised when gradients, or parameters about to be saved, are NaN or infinite; the message names the parameters."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Passed to callbacks after each step.

    ``model()`` returns the current model. The next step donates its arrays: copy what you keep
    (``jax.tree.map(jnp.copy, nnx.state(model))``) or save it.
    """

    step: int
    steps: int
    metrics: Metrics
    load: np.ndarray  # [L, E]: fraction of each MoE layer's assignments per expert (see `Losses`)
    model: Callable[[], CausalLM]
    measured: frozenset[str] = frozenset()  # names of all metrics of the run, including later evaluations


class Callback(Protocol):
    """Called after each step; returns True to stop the training: a bool of Python, NumPy or JAX, or an array with a
    single bool. Results of other types, such as the count returned by ``file.write``, are ignored.

    The next step waits for the callbacks, unless all of them have an attribute ``late = True``. Late callbacks are
    called while the next step is computed. They see metrics only, cannot call ``progress.model``, and can stop the
    training only after a step that is evaluated or saved. A callback that is a context manager is entered before the
    first step, and exited after the last or when the training ends early.
    """

    def __call__(self, progress: Progress, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The result of `fit`: the trained model, the metrics of each step of this call, and the final state.

    If the run had already finished, ``history`` has the metrics of its last step, and a new evaluation if requested.
    """

    model: CausalLM
    history: list[Metrics]
    state: TrainState


def is_true(answer: Any) -> bool:
    """Whether a callback returned a true boolean. Raises ValueError for an array of several booleans."""
    if getattr(answer, "dtype", None) is not None and str(answer.dtype).removeprefix("torch.") == "bool":
        if math.prod(answer.shape) != 1:
            raise ValueError(
                f"a callback returned booleans of the shape {list(answer.shape)}: return one, such as .all() of them"
            )
        return bool(answer)
    return answer is True


def unseen() -> CausalLM:
    """`Progress.model` of late callbacks: raises ValueError."""
    raise ValueError("the next step has begun when a late callback is called: remove its attribute late to see a model")
