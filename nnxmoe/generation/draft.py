"""Drafts for speculative decoding: ids that the model verifies in one pass. Drafts only change the speed."""

import abc
import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.validate import as_python, check_positive, check_type, set_positive
from nnxmoe.generation.passes import unroll_for_decoding
from nnxmoe.generation.rows import StepInputs
from nnxmoe.layers.cache import Cache
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import LOGITS_ONLY, Body, drop_routing
from nnxmoe.model.program import commit_arrays, split_arrays, strip_metadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Draft that copies the ids after an earlier occurrence of the newest ids.

    Prompt lookup decoding (Saxena 2023). Searches the prompt and the new ids for earlier occurrences of
    the newest ids. Uses the longest match of up to ``ngram`` ids, or the latest of several such matches.
    Does not run a second model. Useful if answers copy from the prompt, such as quotes, code or summaries.

    Attributes:
        count: number of ids per draft.
        ngram: maximum length of a match.
    """

    count: int = dataclasses.field(default=7, metadata={"static": True})
    ngram: int = dataclasses.field(default=3, metadata={"static": True})

    def __post_init__(self) -> None:
        set_positive(self, "count", "ngram")

    def empty(self, rows: int, capacity: int) -> None:
        """Return None, because drafts depend only on the history."""

    def read(self, memory: None, ids: Array, valid: Array, states: Array) -> None:
        """Do nothing, because drafts depend only on the history."""
        pass

    def propose(
        self, memory: None, inputs: StepInputs, ids: Array, states: Any, count: Array
    ) -> tuple[Int[Array, "B count"], None]:
        """Propose ids per row. Repeats the last id of a row if the id did not occur earlier."""
        return jax.vmap(self._after)(inputs.history.ids, inputs.history.length), None

    def _after(self, ids: Int[Array, "C"], count: Int[Array, ""]) -> Int[Array, "count"]:
        positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
        matches, length = jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
        for offset in range(self.ngram):  # compare the ids before each position with the newest ids
            newest = ids[jnp.maximum(count - 1 - offset, 0)]
            matches &= (jnp.roll(ids, offset + 1) == newest) & (positions > offset) & (count > offset)
            length += matches
        length = jnp.where(positions < count, length, 0)
        best = jnp.max(jnp.where(length > 0, length * ids.shape[0] + positions, 0))
        start = jnp.where(best > 0, best % ids.shape[0], count - 1)
        period = jnp.maximum(count - start, 1)  # beyond the newest id, the copied ids repeat
        return ids[start + jnp.arange(self.count) % period]


class _Memory(NamedTuple):
    """Memory of a `ModelBasedDraft`.

    Attributes:
        cache: cache of the draft model.
        state: last hidden state of the main model in each row.
        known: whether ``state`` is set.
    """

    cache: Cache
    state: Float[Array, "B D"]
    known: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelBasedDraft(abc.ABC):
    """Base class of drafts that run a model with a separate cache. A pytree of the model's arrays."""

    graph: Any = dataclasses.field(metadata={"static": True}, repr=False)
    tree: Any = dataclasses.field(metadata={"static": True}, repr=False)
    leaves: list[Array] = dataclasses.field(repr=False)
    count: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def _of(cls, modules: Any, count: int) -> Self:
        check_positive(cls.__name__, "count", count := as_python(count))
        graph, tree, leaves = split_arrays(modules)
        return cls(graph, tree, leaves, count)

    def commit(self, place: Sharding | None) -> Self:
        """Return a copy whose arrays are committed to the devices of ``place``, or by default to their own devices."""
        leaves = commit_arrays(self.leaves, place)
        if place is not None:
            devices = place.device_set
            leaves = [a if a.sharding.device_set == devices else jax.device_put(a, place) for a in leaves]
        return dataclasses.replace(self, leaves=leaves)

    @property
    def modules(self) -> Any:
        """Modules of the draft. ``decoder`` is a model with the embedding and the output head."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, self.leaves))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the draft model."""
        return self.modules["decoder"].vocab_size

    @abc.abstractmethod
    def _pass(self, modules: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        """Run the draft model on ids.

        Args:
            states: for each id, the preceding hidden state. It comes from the main model, or from the
                draft model for drafted ids.
        """

    def propose(
        self, memory: _Memory, inputs: StepInputs, ids: Array, states: Any, count: Array
    ) -> tuple[Int[Array, "B count"], _Memory]:
        """Draft ids one at a time. Each id is sampled with the random key that the main model will use."""
        modules, valid = self.modules, jnp.arange(ids.shape[1])[None] < count[:, None]
        states = memory.state[:, None] if states is None else states
        body = self._pass(modules, memory.cache, ids, valid, states)
        assert body.cache is not None
        length, cache = body.cache.length, body.cache
        last_index = jnp.maximum(count - 1, 0)[:, None, None]
        x, states = (jnp.take_along_axis(array, last_index, axis=1) for array in (body.x, body.mtp_hidden))
        drafts = jnp.zeros((ids.shape[0], 0), jnp.int32)
        for step in range(self.count):
            next_ids = inputs.sample(modules["decoder"].logits(x)[:, 0], drafts)[0][:, None]
            drafts = jnp.concatenate([drafts, next_ids], axis=1)
            if step + 1 < self.count:
                body = self._pass(modules, cache, next_ids, valid[:, :1], states)
                x, states, cache = body.x, body.mtp_hidden, body.cache
        assert cache is not None
        return drafts, memory._replace(
            cache=dataclasses.replace(cache, length=length)
        )  # removes the draft tokens from the cache


@jax.tree_util.register_dataclass
class ModelDraft(ModelBasedDraft):
    """Draft tokens from a smaller model: ``ModelDraft.of(small, 4)`` (speculative decoding, Leviathan et al. 2023).

    `Engine` raises ValueError if the vocabulary sizes of the two models differ.
    """

    @classmethod
    def of(cls, model: CausalLM, count: int = 4) -> Self:
        """Create a draft that proposes ``count`` ids with a smaller model."""
        check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
        return cls._of(nnx.Dict(decoder=strip_metadata(unroll_for_decoding(model))), count)

    def empty(self, rows: int, capacity: int) -> _Memory:
        """Create an empty cache of the smaller model with space for the drafts."""
        cache = self.modules["decoder"].empty_cache(rows, capacity + self.count, self.count)
        return _Memory(cache, jnp.zeros((rows, 1)), jnp.zeros(rows, bool))

    def read(self, memory: _Memory, ids: Array, valid: Array, states: Array) -> _Memory:
        """Append the chunk to the cache of the smaller model."""
        return memory._replace(cache=self._pass(self.modules, memory.cache, ids, valid, states).cache)

    def _pass(self, modules: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        return modules["decoder"].body(ids, valid, cache=cache, request=LOGITS_ONLY)


@jax.tree_util.register_dataclass
class MTPDraft(ModelBasedDraft):
    """Draft tokens from the model's multi-token prediction layer: ``MTPDraft.of(model)``.

    Requires a model that was loaded with ``mtp=True``. The first-depth layer predicts one
    additional id. For further draft tokens, the layer reads its previous output states. The layer was
    not trained on these states, so fewer of these tokens are accepted.
    """

    @classmethod
    def of(cls, model: CausalLM, count: int = 1) -> Self:
        """Create a draft that proposes ``count`` ids. Raises ValueError if the model has no prediction layers."""
        check_type("model", model, CausalLM, "a model, such as nnxmoe.from_pretrained(path)")
        if not model.mtp:
            raise ValueError("the model has no multi-token prediction layers: load it with mtp=True")
        return cls._of(mtp_modules(model), count)

    def empty(self, rows: int, capacity: int) -> _Memory:
        """Create an empty cache of the prediction layer with space for the drafts."""
        modules = self.modules
        cache = modules["mtp"].empty_cache(modules["decoder"], rows, capacity + self.count)
        return _Memory(cache, jnp.zeros((rows, modules["mtp"].width), modules["decoder"].dtype), jnp.zeros(rows, bool))

    def read(self, memory: _Memory, ids: Array, valid: Array, states: Array) -> _Memory:
        """Append the chunk to the cache. Each id is combined with the state of the previous id.

        Stores the state of the last id for the next chunk.
        """
        previous_states = jnp.concatenate([memory.state[:, None], states[:, :-1].astype(memory.state.dtype)], axis=1)
        known = jnp.concatenate([memory.known[:, None], valid[:, :-1]], axis=1)
        cache = self._pass(self.modules, memory.cache, ids, known & valid, previous_states).cache
        assert cache is not None
        return _Memory(cache, states[:, -1].astype(memory.state.dtype), memory.known | valid[:, -1])

    def _pass(self, modules: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        return modules["mtp"](modules["decoder"], states, ids, valid, cache=cache, reduce_routing=drop_routing)


def mtp_modules(model: CausalLM) -> Any:
    """Return the modules that `MTPDraft` runs.

    Returns:
        ``mtp`` is the multi-token prediction layer of the first depth. ``decoder`` is the model without
        layers, for the embedding and the output head.
    """
    decoder = strip_metadata(model)
    decoder.stacks = nnx.List([])
    return nnx.Dict(decoder=decoder, mtp=model.mtp[0])
