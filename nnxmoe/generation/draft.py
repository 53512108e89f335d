"""Drafts of what may follow, for a model to verify several ids in one pass. They change the speed, never the ids."""

import abc
import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnxmoe.config.validate import as_python, check_positive, check_type, set_positive
from nnxmoe.generation.passes import unroll_for_decoding
from nnxmoe.generation.rows import StepInputs
from nnxmoe.layers.cache import Cache
from nnxmoe.model.causal_lm import CausalLM
from nnxmoe.model.output import LOGITS_ONLY, Body, drop_routing
from nnxmoe.model.program import split_arrays, strip_metadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Proposes what followed the last time that the newest ids occurred, in the prompt or after it: ``count`` ids after
    the latest occurrence of the longest run of up to ``ngram`` ids (Saxena 2023, prompt lookup decoding).

    It costs no pass of another model, and pays where answers copy: quotes, code, summaries.
    """

    count: int = dataclasses.field(default=7, metadata={"static": True})
    ngram: int = dataclasses.field(default=3, metadata={"static": True})

    def __post_init__(self) -> None:
        set_positive(self, "count", "ngram")

    def empty(self, rows: int, capacity: int) -> None:
        """No memory: drafts depend on the history only."""

    def read(self, memory: None, ids: Array, valid: Array, states: Array) -> None:
        pass

    def propose(
        self, memory: None, inputs: StepInputs, ids: Array, states: Any, count: Array
    ) -> tuple[Int[Array, "B count"], None]:
        """Drafts for each row; repetitions of its last id where nothing occurred before."""
        return jax.vmap(self._after)(inputs.history.ids, inputs.history.count), None

    def _after(self, ids: Int[Array, "C"], count: Int[Array, ""]) -> Int[Array, "count"]:
        places = jnp.arange(ids.shape[0], dtype=jnp.int32)
        alike, length = jnp.ones(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
        for back in range(self.ngram):  # whether the ids that end before each place are the newest ones
            newest = ids[jnp.maximum(count - 1 - back, 0)]
            alike &= (jnp.roll(ids, back + 1) == newest) & (places > back) & (count > back)
            length += alike
        length = jnp.where(places < count, length, 0)
        best = jnp.max(jnp.where(length > 0, length * ids.shape[0] + places, 0))
        start = jnp.where(best > 0, best % ids.shape[0], count - 1)
        period = jnp.maximum(count - start, 1)  # beyond the newest id, the run goes on as it began
        return ids[start + jnp.arange(self.count) % period]


class _Memory(NamedTuple):
    """Memory of a draft that is a model: its cache, and the last state of each row that it was given."""

    cache: Cache
    state: Float[Array, "B D"]
    known: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelBasedDraft(abc.ABC):
    """Drafts of a model that has a cache of its own. A pytree whose leaves are the model's arrays."""

    graph: Any = dataclasses.field(metadata={"static": True}, repr=False)
    tree: Any = dataclasses.field(metadata={"static": True}, repr=False)
    leaves: list[Array] = dataclasses.field(repr=False)
    count: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def _of(cls, parts: Any, count: int) -> Self:
        check_positive(cls.__name__, "count", count := as_python(count))
        return cls(*split_arrays(parts), count)

    @property
    def modules(self) -> Any:
        """The modules that draft, ``decoder`` among them: a model with the embedding and the output head."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, self.leaves))

    @property
    def vocab_size(self) -> int:
        """Number of ids that it can propose."""
        return self.modules["decoder"].vocab_size

    @abc.abstractmethod
    def _pass(self, parts: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        """States after ids, each given the main model's state (or this model's own) that led to it."""

    def propose(
        self, memory: _Memory, inputs: StepInputs, ids: Array, states: Any, count: Array
    ) -> tuple[Int[Array, "B count"], _Memory]:
        """Drafts one after the other, each drawn with the key by which the model will draw."""
        parts, valid = self.modules, jnp.arange(ids.shape[1])[None] < count[:, None]
        states = memory.state[:, None] if states is None else states
        body = self._pass(parts, memory.cache, ids, valid, states)
        assert body.cache is not None
        length, cache = body.cache.length, body.cache
        at = jnp.maximum(count - 1, 0)[:, None, None]
        x, states = (jnp.take_along_axis(each, at, axis=1) for each in (body.x, body.mtp_hidden))
        drafts = jnp.zeros((ids.shape[0], 0), jnp.int32)
        for place in range(self.count):
            one = inputs.sample(parts["decoder"].logits(x)[:, 0], drafts)[0][:, None]
            drafts = jnp.concatenate([drafts, one], axis=1)
            if place + 1 < self.count:
                body = self._pass(parts, cache, one, valid[:, :1], states)
                x, states, cache = body.x, body.mtp_hidden, body.cache
        assert cache is not None
        return drafts, memory._replace(cache=dataclasses.replace(cache, length=length))  # of drafts nothing is kept


@jax.tree_util.register_dataclass
class ModelDraft(ModelBasedDraft):
    """Drafts of a smaller model: ``ModelDraft.of(small, 4)`` (Leviathan et al. 2023). `Engine` raises ValueError for
    one with a vocabulary of another size."""

    @classmethod
    def of(cls, model: CausalLM, count: int = 4) -> Self:
        check_type("model", model, CausalLM, "a model, such as that of nnxmoe.from_pretrained(path)")
        return cls._of(nnx.Dict(decoder=strip_metadata(unroll_for_decoding(model))), count)

    def empty(self, rows: int, capacity: int) -> _Memory:
        cache = self.modules["decoder"].empty_cache(rows, capacity + self.count, self.count)
        return _Memory(cache, jnp.zeros((rows, 1)), jnp.zeros(rows, bool))

    def read(self, memory: _Memory, ids: Array, valid: Array, states: Array) -> _Memory:
        """Read the chunk too."""
        return memory._replace(cache=self._pass(self.modules, memory.cache, ids, valid, states).cache)

    def _pass(self, parts: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        return parts["decoder"].body(ids, valid, cache=cache, request=LOGITS_ONLY)


@jax.tree_util.register_dataclass
class MTPDraft(ModelBasedDraft):
    """Drafts of the model's own multi-token prediction layer: ``MTPDraft.of(model)``, loaded with ``mtp=True``.

    Its first depth predicts one id further on. For more drafts it goes on from its own states, which it was not trained
    to do, so that fewer of them are accepted.
    """

    @classmethod
    def of(cls, model: CausalLM, count: int = 1) -> Self:
        """Drafts of ``count`` ids. Raises ValueError for a model without such layers."""
        check_type("model", model, CausalLM, "a model, such as that of nnxmoe.from_pretrained(path)")
        if not model.mtp:
            raise ValueError("the model has no multi-token prediction layers: load it with mtp=True")
        return cls._of(mtp_modules(model), count)

    def empty(self, rows: int, capacity: int) -> _Memory:
        parts = self.modules
        cache = parts["mtp"].empty_cache(parts["decoder"], rows, capacity + self.count)
        return _Memory(cache, jnp.zeros((rows, parts["mtp"].width), parts["decoder"].dtype), jnp.zeros(rows, bool))

    def read(self, memory: _Memory, ids: Array, valid: Array, states: Array) -> _Memory:
        """Each id meets the state of the one before it; that of the chunk's last id waits for the next id."""
        before = jnp.concatenate([memory.state[:, None], states[:, :-1].astype(memory.state.dtype)], axis=1)
        known = jnp.concatenate([memory.known[:, None], valid[:, :-1]], axis=1)
        cache = self._pass(self.modules, memory.cache, ids, known & valid, before).cache
        assert cache is not None
        return _Memory(cache, states[:, -1].astype(memory.state.dtype), memory.known | valid[:, -1])

    def _pass(self, parts: Any, cache: Cache, ids: Array, valid: Array, states: Array) -> Body:
        return parts["mtp"](parts["decoder"], states, ids, valid, cache=cache, reduce_routing=drop_routing)


def mtp_modules(model: CausalLM) -> Any:
    """The first depth for multi-token prediction, and the model's embedding and head as a decoder without layers."""
    decoder = strip_metadata(model)
    decoder.stacks = nnx.List([])
    return nnx.Dict(decoder=decoder, mtp=model.mtp[0])
