"""Causal language models: a decoder with its config, its strategy and a report of where its weights came from."""

import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Key

from nnxmoe.axes import check_mesh
from nnxmoe.config.arguments import answers_transformers
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.layers.cache import Cache
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.by_run import RunByRun, pays, run_plan
from nnxmoe.model.decoder import Decoder, Ids, Output, TokenMask
from nnxmoe.model.inputs import are_arrays, as_array, bucket, check_tokens, cut, lengths_after, padded
from nnxmoe.model.mtp import MTP, count_mtp, make_mtp
from nnxmoe.model.runs import Runs
from nnxmoe.model.stack import ScannedStack, Unrolled
from nnxmoe.model.strategy import Strategy
from nnxmoe.model.structure import split_once
from nnxmoe.model.weight_names import Table
from nnxmoe.runtime.progress import logger


class CausalLM(Decoder):
    """A decoder-only language model: ``Mixtral(MixtralConfig(…), nnxmoe.Strategy(…), rngs=nnx.Rngs(0), dtype=…)``.

    ``dtype``: of the parameters, and of the activations unless the strategy has a ``compute_dtype``. ``rngs`` None:
    a model of shapes without arrays. With a mesh in the strategy every device initialises its own shards. Raises
    ConfigError for the config of another family.

    ``mtp``: with the layers for multi-token prediction (`MTP`), which are `mtp`, else empty; the logits do not depend
    on them.

    It is split once, and what was compiled for its structure is kept as long as that does not change (`split_once`).

    A family is a subclass that declares its configs and its tables of tensor names, and whose `runs` makes its layers.
    """

    configs: ClassVar[tuple[type[DecoderConfig], ...]]
    presets: ClassVar[Mapping[str, DecoderConfig]] = {}
    hub_ids: ClassVar[Mapping[str, str]] = {}  # preset -> its checkpoint on the hub
    hub_notes: ClassVar[Mapping[str, str]] = {}  # preset -> how those files differ from what is loaded
    hf_table: ClassVar[Table]
    maxtext_table: ClassVar[Mapping[str, tuple[str, tuple[str | None, ...]]]] = {}  # -> name and logical axes there
    maxtext_layers: ClassVar[tuple[str, str]] = ("layers", "layers")  # groups of dense layers, of layers with experts
    maxtext_block: ClassVar[Sequence[bool]] = ()  # for each layer of a block scanned there: whether it has a window
    load_report: Any = None

    def runs(self, config: Any, strategy: Strategy, dtype: jnp.dtype) -> Runs:
        """Runs of equal layers, first to last: pairs of their number and a function that makes one of them. `runs_of`
        finds them where layers differ."""
        raise TypeError("a model class must define runs(config, strategy, dtype)")

    def embedding(self, config: Any, strategy: Strategy, **kw: Any) -> Embed:
        """The embedding, which is also the head if the two are tied. ``kw``, here and below: dtype and rngs."""
        return Embed(config.vocab_size, config.hidden_size, mesh=strategy.mesh, rules=strategy.rules, **kw)

    def final_norm(self, config: Any, **kw: Any) -> RMSNorm:
        """The norm after the layers."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, **kw)

    def output_head(self, config: Any, **kw: Any) -> Linear | None:
        """The output head; None if it is the embedding."""
        tied = config.tie_word_embeddings
        return None if tied else Linear((config.hidden_size,), (config.vocab_size,), ("embed", "vocab"), **kw)

    def __init__(
        self,
        config: DecoderConfig,
        strategy: Strategy | None = None,
        *,
        rngs: nnx.Rngs | None,
        dtype: Any = jnp.float32,
        mtp: bool = False,
    ):
        name, strategy, dtype = type(self).__name__, strategy or Strategy(), jnp.dtype(dtype)
        if type(config) not in self.configs:
            wanted = " or a ".join(kind.__name__ for kind in self.configs)
            raise ConfigError(f"{name} takes a {wanted}, got {type(config).__name__}")
        _check_arguments(name, strategy, rngs)
        dim, eps = config.hidden_size, config.rms_norm_eps
        layers, depths = self.runs(config, strategy, dtype), count_mtp(config, self.hf_table) if mtp else 0
        self.config = config
        self.strategy = strategy
        self.generation_config = {}
        self.merged: Any = None  # adapters, by `nnxmoe.train.lora.merge`

        def parts(key: Array | None) -> dict[str, Any]:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": None if key is None else nnx.Rngs(key)}
            return {
                "embed": self.embedding(config, strategy, **kw),
                "stacks": nnx.List(strategy.stacks(layers, kw["rngs"])),
                "norm": self.final_norm(config, **kw),
                "head": self.output_head(config, **kw),
                "mtp": nnx.List(make_mtp(depths, dim, eps, layers, strategy.remat, **kw)),
            }

        key = None if rngs is None else rngs.params()
        made = parts(None if strategy.mesh is not None else key)
        self.mtp: nnx.List[MTP] = made.pop("mtp")
        placed = {"mesh": strategy.mesh, "cache_format": strategy.cache}
        super().__init__(**made, rope=config.rope, dtype=jnp.dtype(strategy.compute_dtype or dtype), **placed)
        self.label()
        if strategy.mesh is not None:
            check_mesh(self, strategy.mesh, strategy.rules)
        if strategy.mesh is not None and key is not None:
            self._initialise_on_mesh(parts, key)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        count, kinds = sum(leaf.size for leaf in leaves), sorted({str(leaf.dtype) for leaf in leaves})
        ahead = f" and {len(self.mtp)} prediction layers" if self.mtp else ""
        sizes = f"{self.config.num_hidden_layers} layers{ahead}, {count:,} parameters in {', '.join(kinds)}"
        return f"{type(self).__name__}({sizes}, {self.strategy.stacking})"

    __str__ = __repr__

    def label(self) -> None:
        """Stamps every parameter, as `Decoder.label` does; prediction layers are numbered after the others."""
        super().label()
        for k, depth in enumerate(self.mtp):
            depth.label(self.config.num_hidden_layers + k, len(self.stacks) + k)

    def layer_modules(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yields path and module of every module in the layers, those for multi-token prediction included."""
        for name, parts in (("stacks", self.stacks), ("mtp", self.mtp)):
            yield from (((name, *path), module) for path, module in nnx.iter_graph(parts))

    def _initialise_on_mesh(self, parts: Callable[[Array], dict[str, Any]], key: Array) -> None:
        """Initialises each shard on its own device, to the values that a single device would compute."""
        shapes = nnx.to_flat_state(nnx.state(self))
        shardings = [self.strategy.sharding_of(variable) for _, variable in shapes]

        def values(key: Array) -> list[Array]:
            state = nnx.state(nnx.Dict({name: part for name, part in parts(key).items() if part is not None}))
            return [variable.get_value() for _, variable in nnx.to_flat_state(state)]

        made = jax.jit(values, out_shardings=shardings)(key)
        nnx.update(self, nnx.from_flat_state([(p, v.replace(a)) for (p, v), a in zip(shapes, made, strict=True)]))

    @classmethod
    def from_pretrained(cls, path_or_hub_id: Any, **options: Any) -> Self:
        """`nnxmoe.from_pretrained` for this class only. Raises CheckpointError for checkpoints of another class."""
        # Models are below the converters, so only the package's public name of it is known here.
        return importlib.import_module("nnxmoe").from_pretrained(path_or_hub_id, expect=cls, **options)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's defaults for generation; assigning a dict stores a frozen copy."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"generation_config must be a mapping, got {fields!r}")
        self._generation_config = FrozenDict(fields)

    @answers_transformers
    def __call__(
        self,
        tokens: Ids | Sequence[Sequence[int]] | None = None,
        attention_mask: TokenMask | Sequence[Sequence[int]] | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        return_routing: bool = False,
        return_hidden: bool = False,
        key: Key[Array, ""] | None = None,
        *,
        input_ids: Ids | Sequence[Sequence[int]] | None = None,
    ) -> Output:
        """Logits ``[B, T, V]`` in float32 for token ids ``[B, T]``: arrays of JAX or NumPy, lists, or torch tensors.

        ``input_ids`` is transformers' name of the tokens: ``model(**tokenizer(text, return_tensors="np"))`` works.

        ``attention_mask [B, T]``: nonzero for real tokens, 0 for padding; of these T tokens, not of those in the cache.
        ``positions [B, T]``: rotary positions. Default: 0 … T-1, or with a cache the number of real tokens before.
        ``segment_ids [B, T]``: tokens attend to their own segment only (packed documents). ``cache``: from
        ``empty_cache``. ``key``: random key of the router's jitter, if the config has one; None disables it.

        Compiled when called with arrays, and once more for a prompt with an empty cache; inside a transformation such
        as ``jax.jit`` it is traced like any function. So that few programs serve all lengths, T is rounded up to 64,
        96, 128, 192, … with padding, which is cut off again; not with a cache, nor on a mesh, nor if tokens compete
        (`Decoder.separates_tokens`).

        Raises ValueError for ids outside the vocabulary, wrong shapes, a full cache, or a model without values. Inside
        a transformation the length of the cache is unknown, and the logits of rows that do not fit are NaN.
        """
        if (tokens is None) == (input_ids is None):
            raise ValueError("give tokens, or input_ids, which is transformers' name of them, and not both")
        ids = as_array(input_ids if tokens is None else tokens)
        attention_mask, positions, segment_ids = map(as_array, (attention_mask, positions, segment_ids))
        check_tokens(ids, self.embed.table.shape[0], attention_mask, positions, segment_ids)
        lengths = lengths_after(ids, attention_mask, cache)
        if lengths is not None and positions is None and not isinstance(ids, Tracer):
            self.warn_beyond_positions(int(lengths.max()))
        arrays: tuple[Any, ...] = (attention_mask, positions, segment_ids, cache)
        fresh = cache is not None and cache.known_length == 0 and np.shape(ids)[1] > 1  # one token: as any step
        structure, leaves = split_once(self)
        if are_arrays((leaves, ids, arrays, key)):
            length = np.shape(ids)[1]
            exact = cache is not None or self.mesh is not None or not self.separates_tokens(key)
            size = length if exact else bucket(length, 64)
            if size > length:
                ids, *masks = padded(size, ids, attention_mask, positions, segment_ids)
                arrays = (*masks, cache)
            if pays(self):
                forward = RunByRun(self, structure.program(run_plan, False), leaves)
                out = forward(ids, *arrays, return_routing, return_hidden, key, fresh=fresh)
            else:
                out = structure.program(_compiled)(leaves, ids, arrays, key, (return_routing, return_hidden), fresh)
            if lengths is not None and out.cache is not None:
                out.cache.remember(lengths)
            return out if size == length else cut(out, length, attention_mask is None)
        refuse_shapes(leaves)
        traced: Any = super().__call__
        return traced(ids, *arrays, return_routing, return_hidden, key, fresh=fresh)

    def warn_beyond_positions(self, tokens: int) -> None:
        """Logs a warning, once per model, about rows of more tokens than ``max_position_embeddings``."""
        limit = self.config.max_position_embeddings
        if tokens > limit and self not in _warned:
            _warned.add(self)
            text = "a row of up to %d tokens is longer than the %d positions that this model was made for "
            text += "(max_position_embeddings): its output may be poor from there on"
            logger.warning(text, tokens, limit)


# Models whose rows were once longer than their positions.
_warned = weakref.WeakSet[CausalLM]()


def unscan(model: CausalLM) -> CausalLM:
    """A model whose layers have arrays of their own instead of slices of stacked ones (``Scanned``): it decodes faster.

    What was stacked is copied, so both models need memory until the given one is deleted; `nnxmoe.generate` keeps such
    a copy with a scanned model. Without scanned layers this is the model itself.

        model = nnxmoe.unscan(nnxmoe.train.fit(model, …).model)
    """
    if not any(isinstance(stack, ScannedStack) for stack in model.stacks):
        return model
    graph, state = nnx.split(model)
    unrolled = nnx.merge(graph, state)
    unrolled.strategy = dataclasses.replace(model.strategy, stacking=Unrolled(), pipeline=None)
    unrolled.stacks = nnx.List(
        [
            stack.unrolled(model.strategy.sharding_of) if isinstance(stack, ScannedStack) else stack
            for stack in unrolled.stacks
        ]
    )
    unrolled.label()
    return unrolled


def refuse_shapes(leaves: Sequence[Any]) -> None:
    """Raises ValueError if a model's variables have no values."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError("the model has shapes only: load weights first, or make it with rngs=nnx.Rngs(0)")


def split_arrays(module: nnx.Module) -> tuple[Any, Any, list[Array]]:
    """Graph, tree and arrays of a module, for ``nnx.merge(graph, jax.tree.unflatten(tree, arrays))`` in a program.
    Raises ValueError if it has shapes without values."""
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    refuse_shapes(leaves)
    return graph, tree, leaves


def _check_arguments(name: str, strategy: Any, rngs: Any) -> None:
    remedy = f"give random keys as {name}(config, rngs=nnx.Rngs(0)), or rngs=None for shapes without values"
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={type(strategy).__name__}(…) is not an nnxmoe.Strategy: {remedy}")
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise ValueError(f"{remedy}, got rngs={rngs!r}")


@functools.lru_cache(maxsize=32)
def _compiled(graph: Any, tree: Any) -> Any:
    """The compiled forward pass of models with one structure, as a function of their flat list of weights."""

    def run(
        leaves: list[Array], tokens: Array, arrays: tuple[Any, ...], key: Any, asked: tuple[bool, bool], fresh: bool
    ) -> Output:
        decoder = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        return decoder(tokens, *arrays, *asked, key, fresh=fresh)

    return jax.jit(run, static_argnums=(4, 5))
