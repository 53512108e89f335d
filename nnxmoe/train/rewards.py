"""Rewards of sampled completions from Python functions."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from nnxmoe.config.printable import short
from nnxmoe.config.validate import as_number, as_python, iterator_of

RewardFn = Callable[..., Sequence[float | None]]
"""Function ``(prompts, completions, **fields) -> rewards``, one per sample, as in TRL. All arguments are keywords."""


def evaluate_rewards(
    functions: RewardFn | Sequence[RewardFn],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    fields: Mapping[str, Sequence[Any]],
) -> Float[np.ndarray, "functions samples"]:
    """Call each reward function with all samples.

    A function receives the arguments that its signature names, or all arguments if it has ``**kwargs``. It
    returns None for a sample that it does not score, as in TRL. A sample that no function scores is excluded
    from training.

    Args:
        functions: One or several reward functions.
        prompts: Prompt of each sample.
        completions: Completion of each sample.
        fields: Other columns of the prompts' records, repeated per sample.

    Returns:
        The rewards, with NaN instead of None.

    Raises:
        ValueError: If a function raises an exception, or returns a wrong number of values, NaN, infinity
            or other objects. The error names the function and the sample.
    """
    arguments = {**fields, "prompts": prompts, "completions": completions}
    return np.stack([_evaluate(function, arguments) for function in reward_functions(functions)])


def reward_functions(functions: RewardFn | Sequence[RewardFn]) -> tuple[RewardFn, ...]:
    """Return one or several reward functions as a tuple. Raises ValueError if there are none."""
    example = "a function (prompts, completions, **fields), or several"
    sequence = (functions,) if callable(functions) else tuple(iterator_of("reward", functions, example))
    if not sequence or not all(map(callable, sequence)):
        raise ValueError(f"reward={short(functions)}: pass {example}")
    return sequence


def _evaluate(function: RewardFn, arguments: Mapping[str, Any]) -> Float[np.ndarray, "samples"]:
    name, samples = getattr(function, "__name__", type(function).__name__), len(arguments["completions"])
    try:
        values: Any = function(**_select_arguments(function, arguments))
        values = list(values)
    except Exception as error:
        raise ValueError(f"the reward function {name} failed: {type(error).__name__}: {error}") from error
    if len(values) != samples:
        raise ValueError(f"the reward function {name} returned {len(values)} values for {samples} samples")
    for sample, element in enumerate(values):
        value = as_python(element)
        number = float(value) if isinstance(value, bool) else as_number(value)
        if value is not None and (number is None or not math.isfinite(number)):
            raise ValueError(
                f"the reward function {name} returned {short(value)} for sample {sample}: return a finite number, or "
                "None to exclude the sample"
            )
        values[sample] = math.nan if number is None else number
    return np.asarray(values, np.float64)


def _select_arguments(function: RewardFn, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Select the arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
