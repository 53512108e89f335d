"""Detection of modules that change when they are called, such as modules that `sow`.

Compiled programs operate on copies of the modules, so these changes would be lost.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError

# Classes of modules whose variables changed during a call observed by `watch`.
_changing = weakref.WeakSet[type]()
# Classes of modules that `checkpoint_unless_stateful` has called without rematerialization.
_not_rematerialized = weakref.WeakSet[type]()
_logger = logging.getLogger("nnxmoe")


def is_captured(module: nnx.Module) -> bool:
    """Return whether `nnx.capture` collects values from this module."""
    return "__captures__" in vars(module)


def is_stateful(module: nnx.Module) -> bool:
    """Return whether calls change the module: under `nnx.capture`, or if a submodule sows or sets variables.

    A stateful submodule is detected only after `watch` has observed a call to a module of its class.
    """
    if is_captured(module):
        return True
    return bool(_changing) and any(type(part) in _changing for _, part in nnx.iter_modules(module))


def checkpoint_unless_stateful(run: Callable[..., Any], module: Any, **options: Any) -> Callable[..., Any]:
    """Apply `jax.checkpoint` to ``run``, which calls ``module``, unless the call changes the module.

    Flax raises TraceContextError if a module changes inside `jax.checkpoint`. ``run`` is then called again without it.
    Logs a warning for each new class.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_stateful(module):
            return run(*args, **kwargs)
        try:
            return jax.checkpoint(run, **options)(*args, **kwargs)
        except TraceContextError:
            out = run(*args, **kwargs)
        if type(module) not in _not_rematerialized:
            _not_rematerialized.add(type(module))
            _logger.warning("%s contains modules that change when called: not rematerialized", type(module).__name__)
        return out

    return call


def watch(run: Callable[..., Any], module: nnx.Module, *args: Any, **options: Any) -> Any:
    """Return ``run(*args, **options)``, and record the classes of submodules of ``module`` that the call changes.

    Logs a warning for each new class.
    """
    values_before = {id(part): (part, _values(part)) for _, part in nnx.iter_modules(module)}
    out = run(*args, **options)
    for part, values in values_before.values():
        values_after = _values(part)
        is_unchanged = values_after.keys() == values.keys() and all(
            values_after[name] is values[name] for name in values
        )
        if not is_unchanged and type(part) not in _changing:
            _changing.add(type(part))
            _logger.warning(
                "%s changes its variables when it is called, so model(tokens) runs uncompiled to preserve the changes. "
                "Generation and scoring drop the changes",
                type(part).__name__,
            )
    return out


def _values(module: nnx.Module) -> dict[str, Any]:
    variables = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Variable)}
    return {name: variable.get_raw_value() for name, variable in variables.items()}
