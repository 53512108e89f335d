"""Steps of a model's call: argument checks, padding, and compiled programs per model structure."""

import copy
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import Array

from nnxmoe.layers.cache import Cache
from nnxmoe.layers.linear.xla_cpu import jit_outermost
from nnxmoe.layers.stateful import is_captured, watch
from nnxmoe.model.output import ByLayer, Output
from nnxmoe.sharding import is_static, replicated_on


class ModelInputs(NamedTuple):
    """Input arrays ``[B, T]`` of a model, and given expert ids ``[B, T, X]`` by layer. Optional inputs may be None."""

    tokens: Any
    attention_mask: Any
    positions: Any
    segment_ids: Any
    routing: ByLayer | None = None


def check_inputs(vocab_size: int, tokens: Any, attention_mask: Any, positions: Any, segment_ids: Any) -> ModelInputs:
    """Convert the arguments of a model's call to arrays and check them.

    Raises:
        ValueError: A dtype or shape is wrong, or a token id is outside the vocabulary. Traced ids are not checked.
    """
    arguments = {"tokens": tokens, "attention_mask": attention_mask, "positions": positions, "segment_ids": segment_ids}
    inputs = ModelInputs(*(_as_array(name, value) for name, value in arguments.items()))
    shape, dtype = np.shape(inputs.tokens), getattr(inputs.tokens, "dtype", type(inputs.tokens))
    if len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], got {dtype} {list(shape)}")
    for name in arguments:
        array = getattr(inputs, name)
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{name} must have the tokens' shape {list(shape)}, got {list(np.shape(array))}")
    if not isinstance(inputs.tokens, Tracer):
        _check_ids(inputs.tokens, vocab_size)
    return inputs


def _as_array(name: str, value: Any) -> Any:
    if value is None or isinstance(value, jax.Array | np.ndarray):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # rows of different lengths
        raise ValueError(f"{name} must be integers [B, T] with rows of equal length, got {value!r:.80}") from None
    if array.dtype.kind in "USO":
        remedy = ": encode text with the checkpoint's tokenizer, or call nnxmoe.complete(model, text)"
        raise ValueError(f"{name} must be integers [B, T], got {value!r:.80}{remedy if name == 'tokens' else ''}")
    return array


def _check_ids(tokens: Any, vocab_size: int) -> None:
    # NumPy, because JAX would trace a reduction inside a transformation. Each process checks its addressable rows.
    if isinstance(tokens, jax.Array) and not tokens.is_fully_addressable:
        shards = [np.asarray(shard.data) for shard in tokens.addressable_shards]
    else:
        shards = [np.asarray(tokens)]
    low, high = min(int(ids.min()) for ids in shards), max(int(ids.max()) for ids in shards)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids must be in 0 … {vocab_size - 1}, got {low if low < 0 else high}")


def lengths_after_pass(inputs: ModelInputs, cache: Cache | None) -> np.ndarray | None:
    """Count the real tokens of each row after a pass, including cached tokens.

    Returns:
        The counts ``[B]``, or None if the inputs are traced or not fully addressable from this process.

    Raises:
        ValueError: The tokens do not fit in the cache.
    """
    shape, mask = np.shape(inputs.tokens), inputs.attention_mask
    if isinstance(mask, Tracer) or not is_static(*shape):
        return None
    cached_lengths = np.zeros(shape[0], np.int32) if cache is None else cache.lengths
    if cached_lengths is None or (isinstance(mask, jax.Array) and not mask.is_fully_addressable):
        return None
    is_real = np.ones(shape, bool) if mask is None else np.asarray(mask) != 0
    lengths = cached_lengths + is_real.sum(axis=1, dtype=np.int32)
    row = int(np.argmax(lengths))
    if cache is not None and lengths[row] > cache.capacity:
        raise ValueError(
            f"the cache has room for {cache.capacity} tokens; {cached_lengths[row]} are cached and "
            f"{lengths[row] - cached_lengths[row]} more do not fit: create a larger cache with "
            "empty_cache(batch, capacity)"
        )
    return lengths


_warned = weakref.WeakSet[Any]()  # models for which `warn_beyond_positions` has logged its warning


def warn_beyond_positions(model: Any, tokens: int) -> None:
    """Log a warning if a row has more tokens than ``max_position_embeddings``. Warns once per model."""
    limit = model.config.max_position_embeddings
    if tokens > limit and model not in _warned:
        _warned.add(model)
        text = "a row of up to %d tokens is longer than the %d positions that this model supports "
        text += "(max_position_embeddings): the output may be poor beyond these positions"
        logging.getLogger("nnxmoe").warning(text, tokens, limit)


def is_traced(model: Any, arguments: Any) -> bool:
    """Return whether the model or the arguments contain tracers, as inside a transformation.

    Raises:
        ValueError: The model is abstract (shapes and dtypes only).
    """
    parameter = next(part for _, part in nnx.iter_graph(model.embed) if isinstance(part, nnx.Param)).get_value()
    require_values([parameter])
    leaves = {type(leaf): leaf for leaf in jax.tree.leaves((parameter, arguments))}.values()
    return not all(isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, Tracer) for leaf in leaves)


def bucket_size(length: int, smallest: int) -> int:
    """Round ``length`` up to ``smallest`` times 1, 1.5, 2, 3, 4, 6, … to limit the number of compiled sizes."""
    size = smallest
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def pad_inputs(inputs: ModelInputs) -> ModelInputs:
    """Pad the end of each row to a bucket size (at least 64) and mask the padding."""
    batch, length = np.shape(inputs.tokens)
    padding = bucket_size(length, 64) - length
    mask = np.ones((batch, length), bool) if inputs.attention_mask is None else np.asarray(inputs.attention_mask) != 0

    def pad(array: Any) -> np.ndarray:
        return np.pad(np.asarray(array), ((0, 0), (0, padding), *((0, 0),) * (np.ndim(array) - 2)))

    return jax.tree.map(pad, inputs._replace(attention_mask=mask))


def remove_padding(out: Output, length: int, all_real: bool) -> Output:
    """Slice the output to the first ``length`` tokens. If ``all_real``, removes the mask from the routing."""
    first_tokens = functools.partial(_first_tokens, length=length)
    logits, routing, hidden = jax.tree.map(first_tokens, (out.logits, out.routing, out.hidden))
    if routing is not None and all_real:
        routing = ByLayer({i: dataclasses.replace(layer_routing, valid=None) for i, layer_routing in routing.items()})
    return dataclasses.replace(out, logits=logits, routing=routing, hidden=hidden)


def _first_tokens(array: Array, length: int) -> Array:
    if isinstance(array, Tracer) or any(device.platform != "cpu" for device in array.devices()):
        return array[:, :length]
    return jax.device_put(np.asarray(array)[:, :length], array.sharding)  # a JAX slice would compile once per length


def model_program(
    model: Any,
    function: Callable[..., Any],
    *,
    static: tuple[int, ...] = (),
    donated: tuple[int, ...] = (),
    commit: bool = False,
) -> Callable[..., Any]:
    """Return ``function(model, *args)`` as a compiled function of ``args`` with the model's current arrays.

    Models of equal structure share the program.

    Args:
        function: A module-level function. JAX caches programs by the function's identity.
        static: Indices of ``args`` that are hashable constants.
        donated: Indices of ``args`` whose buffers are donated.
        commit: Whether to commit uncommitted arrays of the model (see `commit_arrays`). The program must then not
            be called inside a transformation.

    Raises:
        ValueError: The model is abstract, or `nnx.capture` collects values from the model.
    """
    structure, leaves = split_for_program(model, commit)
    return functools.partial(structure.program(jit_function, function, static, donated, commit), leaves)


def split_for_program(model: Any, commit: bool = False) -> tuple["Structure", list[Array]]:
    """Return the structure and the arrays of a model. With ``commit``, commits the arrays (see `commit_arrays`).

    Raises:
        ValueError: The model is abstract, or `nnx.capture` collects values from the model.
    """
    structure, leaves = split_once(model)
    require_values(leaves)
    return structure, commit_arrays(leaves) if commit else leaves


def commit_arrays(tree: Any, place: Sharding | None = None) -> Any:
    """Commit uncommitted arrays to devices.

    JAX compiles a program a second time if an argument was uncommitted in the first call and is committed now (jax
    0.10.2). Arrays of loaded and initialized models are uncommitted. Outputs of training steps are committed.

    Args:
        tree: Arrays. Committed arrays and other values are returned unchanged.
        place: Sharding for uncommitted arrays. Defaults to `replicated_place` of the tree. If no array is committed,
            each array is committed to its current device, without a copy (11 us per array).
    """
    place = replicated_place(jax.tree.leaves(tree)) if place is None else place

    def commit_array(array: Any) -> Any:
        if not isinstance(array, jax.Array) or isinstance(array, Tracer) or array.committed:
            return array
        if place is None or place.device_set == array.sharding.device_set:
            return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        return jax.device_put(array, place)

    return jax.tree.map(commit_array, tree)


def replicated_place(arrays: Iterable[Any]) -> Sharding | None:
    """Return a sharding that replicates to the devices of the committed arrays, or None if no array is committed.

    If the committed arrays have different sets of devices, the largest set is used. Abstract arrays with a sharding
    count as committed.
    """
    concrete = [a for a in arrays if hasattr(a, "sharding") and not isinstance(a, Tracer)]
    places = [a.sharding for a in concrete if a.sharding is not None and getattr(a, "committed", True)]
    return replicated_on(max(places, key=lambda place: place.num_devices)) if places else None


@functools.lru_cache(maxsize=64)
def jit_function(
    graph: Any,
    tree: Any,
    function: Callable[..., Any],
    static: tuple[int, ...],
    donated: tuple[int, ...],
    outermost: bool = False,
) -> Callable[..., Any]:
    """Compile ``function(module, *args)`` as a function of the module's arrays and ``args`` (see `model_program`).

    ``outermost`` programs are never called inside a transformation.
    """

    def run(leaves: list[Array], *args: Any) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return watch(function, module, module, *args)

    jit = jit_outermost if outermost else jax.jit
    return jit(run, static_argnums=[1 + i for i in static], donate_argnums=[1 + i for i in donated])


def require_values(leaves: Sequence[Any]) -> None:
    """Raise ValueError if a model is abstract (a variable has a shape but no value)."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model is abstract (shapes only). Load weights first, or create it with rngs=nnx.Rngs(0)")


def split_arrays(module: nnx.Module) -> tuple[Any, Any, list[Array]]:
    """Split a module into graph, tree and arrays, for ``nnx.merge(graph, jax.tree.unflatten(tree, arrays))``.

    Raises:
        ValueError: The module is abstract (shapes and dtypes only).
    """
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    require_values(leaves)
    return graph, tree, leaves


# Attributes that do not affect calls. Models that differ only in these attributes share programs.
_METADATA = {"config", "strategy", "mtp", "merged", "load_report", "_generation_config"}
_NOT_CALLED = _METADATA | {"_pytree__nodes", "_pytree__state"}


def strip_metadata(model: Any) -> Any:
    """Copy a model without its config, strategy, prediction layers and reports."""
    stripped = copy.copy(model)
    for name in _METADATA:
        vars(stripped).pop(name, None)  # flax rejects delattr inside a transformation
    return stripped


class Structure:
    """Structure of a model (graph and parameter tree), with the programs compiled for it.

    References to modules are weak, so programs do not keep replaced modules in memory.
    """

    def __init__(self, model: Any, stripped: Any, graph: Any, state: Any):
        self.graph, self.tree = graph, jax.tree.structure(state)
        self._programs: dict[Any, Any] = {}
        parts = dict(nnx.iter_graph(stripped))
        modules = [part for part in parts.values() if isinstance(part, nnx.Module) and part is not stripped]
        self._modules = [(weakref.ref(model), _fingerprint(model, _NOT_CALLED))]
        self._modules += [(weakref.ref(module), _fingerprint(module)) for module in modules]
        # References keep the ids in the fingerprints valid: Python may reuse the id of a deleted object.
        attributes = [value for module in (stripped, *modules) for value in vars(module).values()]
        self._settings = [value for value in attributes if not isinstance(value, nnx.Module | nnx.Variable)]
        paths = [path for path, _ in nnx.to_flat_state(state)]
        # Models that have arrays outside of variables or mutable containers are split on every call.
        self._comparable = not any(type(part) in (list, dict, set) for part in parts.values())
        for path in paths:
            variable, owner = parts.get(path), parts.get(path[:-1])
            self._comparable &= isinstance(variable, nnx.Variable) and isinstance(owner, nnx.Module)
        paths = paths if self._comparable else []
        self._places = [(weakref.ref(parts[path[:-1]]), str(path[-1])) for path in paths]
        self._metadata = [parts[path].get_metadata() for path in paths]
        self._values = jax.tree.structure([parts[path].get_raw_value() for path in paths])

    def current_arrays(self) -> list[Any] | None:
        """Return the parameters' arrays (shapes if they have no values), or None if the structure has changed.

        For 32 layers, this comparison takes less than 1 ms and a split takes 14 to 100 ms.
        """
        if not self._comparable:
            return None
        for i, (reference, fingerprint) in enumerate(self._modules):
            module = reference()
            if module is None or _fingerprint(module, _NOT_CALLED if i == 0 else ()) != fingerprint:
                return None
        variables = [getattr(module(), name) for module, name in self._places]
        if [variable.get_metadata() for variable in variables] != self._metadata:
            return None
        leaves, tree = jax.tree.flatten([variable.get_raw_value() for variable in variables])
        return leaves if tree == self._values else None

    def program(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``make(graph, tree, *arguments)``. Caches the result for equal arguments."""
        key = make, arguments
        if key not in self._programs:
            self._programs[key] = make(self.graph, self.tree, *arguments)
        return self._programs[key]


def _fingerprint(module: Any, ignored: Collection[str] = ()) -> tuple[Any, ...]:
    """Return a module's class and the ids of its attributes. For variables, returns the class instead of the id."""
    values = [value for name, value in vars(module).items() if name not in ignored]
    # `isinstance` takes three times as long, because Flax overrides it for variables.
    return type(module), *(type(v) if issubclass(type(v), nnx.Variable) else id(v) for v in values)


_structures = weakref.WeakKeyDictionary[Any, Structure]()


def split_once(model: Any) -> tuple[Structure, list[Any]]:
    """Return a model's structure and the arrays of its parameters. Splits the model only if its structure has changed.

    The arrays are ``jax.ShapeDtypeStruct`` if the model has no values (see `require_values`).

    Raises:
        ValueError: `nnx.capture` collects values from the model.
    """
    if is_captured(model):
        raise ValueError("nnx.capture supports only model(tokens): call this function outside of nnx.capture")
    structure = _structures.get(model)
    leaves = None if structure is None else structure.current_arrays()
    if structure is None or leaves is None:
        stripped = strip_metadata(model)
        graph, state = nnx.split(stripped)
        structure = _structures[model] = Structure(model, stripped, graph, state)
        leaves = jax.tree.leaves(state)
    return structure, leaves
