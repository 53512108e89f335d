"""Compiled programs that outlive the objects that made them: equal programs are compiled once per process."""

import collections
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from nnxmoe.runtime.progress import say

_LIMIT = 64
# XLA:CPU starts independent collectives of a program of several devices in any order, in which devices wait for each
# other for ever, above all in programs from the compilation cache (jax 0.10.2, 0.12.0). A schedule has one order.
# ``xla_cpu_enable_concurrency_optimized_scheduler=False`` is without effect as an option of a single program.
_IN_ORDER: Any = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
_programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()


class SharedProgram:
    """``jax.jit(function, **options)``, without static arguments, whose programs are shared by all of this process.

    The function is traced for each combination of shapes, dtypes and shardings. It is compiled only if no program with
    the same StableHLO, devices and structures of inputs and outputs has been, by whichever `SharedProgram`. ``name``:
    what a message calls it before it compiles; None: no message. ``jitted``: the function of ``jax.jit`` itself.
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None, **options: Any):
        self.jitted, self._name, self._options = jax.jit(function, **options), name, options
        self._known: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        return self.prepare(*arguments)(*arguments)

    def knows(self, *arguments: Any) -> bool:
        """Whether a call with such arguments neither traces nor compiles."""
        return shapes_of(arguments) in self._known

    def prepare(self, *arguments: Any) -> Any:
        """The compiled program for such arguments."""
        shapes = shapes_of(arguments)
        if shapes not in self._known:
            self._known[shapes] = self._shared(arguments)
        return self._known[shapes]

    def _shared(self, arguments: tuple[Any, ...]) -> Any:
        lowered = self.jitted.lower(*arguments)
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        places = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves((arguments, self._options))]
        key = text, lowered.in_tree, lowered.out_tree, tuple(p for p in places if isinstance(p, Sharding))
        if key not in _programs:
            if self._name is not None:
                say("compiling %s", self._name)
            _programs[key] = lowered.compile(_IN_ORDER if any(map(_on_cpus, key[-1])) else None)
        _programs.move_to_end(key)
        if len(_programs) > _LIMIT:
            _programs.popitem(last=False)
        return _programs[key]


def _on_cpus(place: Sharding) -> bool:
    """Whether arrays are sharded over several CPU devices."""
    return len(place.device_set) > 1 and next(iter(place.device_set)).platform == "cpu"


def shapes_of(arguments: Any) -> Any:
    """The structure of a pytree with the shapes, dtypes and shardings of its arrays, as a key."""
    leaves, tree = jax.tree.flatten(arguments)
    return tree, tuple((np.shape(a), jax.dtypes.result_type(a), getattr(a, "sharding", None)) for a in leaves)
