"""Causal language models: embedding, stacks of layers, norm and output head, with their config and strategy."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from nnxmoe.config.arguments import refuses_unknown
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.rope_parameters import DynamicRope
from nnxmoe.config.validate import floating_dtype
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.cache import Cache, format_caches
from nnxmoe.layers.context import Attention, Context, FeedForward, OutputRequest
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear.kernel import Kernel, as_weight
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.model.layer import Layer
from nnxmoe.model.output import EVERYTHING, Body, ByLayer, Ids, Output, TokenMask, drop_routing
from nnxmoe.model.program import (
    ModelInputs,
    check_inputs,
    is_traced,
    lengths_after_pass,
    model_program,
    pad_inputs,
    remove_padding,
    warn_beyond_positions,
)
from nnxmoe.model.stack import concatenate_layers, stacks_of
from nnxmoe.model.stateful import is_stateful
from nnxmoe.model.strategy import Strategy, check_arguments
from nnxmoe.model.tree import children
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.sharding import is_static, shard_batch


class CausalLM(nnx.Module):
    """A decoder-only transformer: ``Mixtral(MixtralConfig(…), nnxmoe.Strategy(…), rngs=nnx.Rngs(0), dtype=…)``.

    A family is a subclass with configs that builds ``attention`` and ``feed_forward``. The names of its weights in
    files are in its `Family`.
    `model_program` compiles functions of a model, and splits the model once as long as its structure stays the same.

    Args:
        rngs: None for a model of shapes without arrays. On a mesh every device initialises its own shards.
        dtype: of the parameters, and of the activations unless the strategy has a ``compute_dtype``.
        mtp: whether to add the layers for multi-token prediction (`MTP`), which the logits do not depend on.
    Raises:
        ConfigError: the config is one of another family.
    """

    configs: ClassVar[tuple[type[DecoderConfig], ...]]
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm  # before attention and feed-forward, and after all layers
    supports_mtp: ClassVar[bool] = False  # whether checkpoints of the family have multi-token prediction layers
    config: Any

    def attention(self, index: int, **kw: Any) -> Attention:
        """The attention of a layer. ``kw``, here and below: dtype and rngs."""
        raise TypeError("a model class must define attention(index, **kw)")

    def feed_forward(self, index: int, **kw: Any) -> FeedForward:
        """The feed-forward of a layer."""
        raise TypeError("a model class must define feed_forward(index, dtype=…, rngs=…)")

    def layer_type(self, index: int) -> Any:
        """Hashable kind of a layer, by which consecutive ones form a stack. Override it if other parts differ too."""
        return self.config.windows[index], self.config.sparse_layers[index]

    def layer(self, index: int, form: type[Layer] = Layer, *, dtype: Any, rngs: Any, **options: Any) -> Layer:
        """A layer of this ``form``, with its ``options``."""
        kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        attention, fed = self.attention(index, **kw), self.feed_forward(index, **kw)
        one, other = (self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, **kw) for _ in range(2))
        return form(one, attention, other, fed, **options)

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> Any:
        """The input of the first layer: the embedding ``x`` of the ``tokens``, or a pytree of it and of what layers
        hand on beside it."""
        return x

    def from_layer_output(self, x: Any) -> Float[Array, "B asked D"]:
        """The hidden states in what a layer hands on; the inverse of `enter`."""
        return x

    def mtp_hidden(self, before: Any, after: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
        """What prediction layers (`MTP`) read of tokens, from the input and the result of the last norm."""
        return after

    def gqa(self, index: int, form: Callable[..., Any] = GQA, *, bias: bool, **options: Any) -> Any:
        """`GQA`, or another ``form`` of it, as the config says for a layer. ``options``: arguments of `AttentionDims`
        and `GQA` in place of the config's, and those of the form."""
        c = self.config
        sizes = {"heads": c.num_attention_heads, "kv_heads": c.kv_heads, "head_dim": c.head_width}
        sizes |= {"scale": c.query_scale, "out_bias": None, "value_dim": None}
        heads = AttentionDims(
            c.hidden_size, bias=bias, **{name: options.pop(name, size) for name, size in sizes.items()}
        )
        chosen = {"rotary": c.rope, "window": c.windows[index], "attention_fn": self.strategy.attention_fn, **options}
        return form(heads, **chosen)

    def moe(self, router: Router, width: int, shared: Any = None, **options: Any) -> MoE:
        """A feed-forward with an expert of ``width`` for each logit of the router, computed as the strategy says.
        ``options``: dtype and rngs of its `Experts`, their activation and biases, and the norm of the `MoE`."""
        s, weight = self.strategy, as_weight(router.kernel)
        (dim,), (count,) = weight.ins, weight.outs
        norm = options.pop("norm", None)
        experts = Experts(dim, width, count, matmul=s.matmul, rules=s.rules, **options)
        return MoE(router, experts, s.dispatch, shared, s.mesh, norm)

    def embedding(self, form: Callable[..., Embed] = Embed, **options: Any) -> Embed:
        """The embedding, which is also the head if the two are tied."""
        c, s = self.config, self.strategy
        return form(c.vocab_size, c.hidden_size, mesh=s.mesh, rules=s.rules, **options)

    def final_norm(self, **kw: Any) -> RMSNorm:
        """The norm after the layers."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, **kw)

    def output_head(self, **kw: Any) -> Linear | None:
        """The output head; None if it is the embedding."""
        c = self.config
        return None if c.tie_word_embeddings else Linear((c.hidden_size,), (c.vocab_size,), ("embed", "vocab"), **kw)

    def __init__(
        self,
        config: DecoderConfig,
        strategy: Strategy | None = None,
        *,
        rngs: nnx.Rngs | None,
        dtype: Any = jnp.float32,
        mtp: bool = False,
    ):
        strategy, dtype = strategy or Strategy(), floating_dtype(type(self).__name__, "dtype", dtype)
        check_arguments(type(self), config, strategy, rngs)
        self.config, self.strategy = config, strategy
        ahead = self._prediction_layers() if mtp else lambda **kw: []
        self.generation_config = {}
        self.load_report: Any = None
        self.merged: Any = None  # adapters, by `nnxmoe.train.lora.merge`

        def parts(key: Array | None) -> dict[str, Any]:
            kw: dict[str, Any] = {"dtype": dtype, "rngs": None if key is None else nnx.Rngs(key)}
            return {
                "embed": self.embedding(**kw),
                "stacks": nnx.List(stacks_of(self, strategy, **kw)),
                "norm": self.final_norm(**kw),
                "head": self.output_head(**kw),
                "mtp": nnx.List(ahead(**kw)),
            }

        key = None if rngs is None else rngs.params()
        made = parts(None if strategy.mesh is not None else key)
        self.mtp: nnx.List[Any] = made["mtp"]
        self.embed, self.stacks, self.norm, self.head = (made[name] for name in ("embed", "stacks", "norm", "head"))
        self.dtype, self.mesh = jnp.dtype(strategy.compute_dtype or dtype), strategy.mesh
        ropes = (getattr(part, "rotary", None) for _, part in nnx.iter_graph(self.stacks))
        self.cache_format, self.ropes = strategy.cache, tuple(dict.fromkeys(rope for rope in ropes if rope is not None))
        if strategy.mesh is not None:
            strategy.initialise(self, parts, key)

    @property
    def mtp_layer_index(self) -> int:
        """Number of the layer whose parts a layer for multi-token prediction has: the last one."""
        return self.config.num_hidden_layers - 1

    def _prediction_layers(self) -> Callable[..., list[Any]]:
        """``(dtype, rngs) -> list[MTP]``; imported here, since few models have them."""
        from nnxmoe.model.mtp import check_mtp, make_mtp

        check_mtp(depths := getattr(self.config, "num_nextn_predict_layers", 0), self)
        return functools.partial(make_mtp, self, depths)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        count, kinds = sum(leaf.size for leaf in leaves), sorted({str(leaf.dtype) for leaf in leaves})
        ahead = f" and {len(self.mtp)} prediction layers" if self.mtp else ""
        sizes = f"{self.config.num_hidden_layers} layers{ahead}, {count:,} parameters in {', '.join(kinds)}"
        return f"{type(self).__name__}({sizes}, {self.strategy.stacking})"

    def __str__(self) -> str:
        """`repr`, followed by one line per part."""
        parts = {name: getattr(self, name) for name in ("embed", "stacks", "norm", "head", "mtp")}
        return "\n".join((repr(self), *children(parts, "  ")))

    @classmethod
    def from_pretrained(cls, path_or_hub_id: Any, **options: Any) -> Self:
        """`nnxmoe.from_pretrained` for this class only. Raises CheckpointError for checkpoints of another class."""
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

    @refuses_unknown
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
        """Compute logits ``[B, T, V]`` in float32 for token ids ``[B, T]``: JAX or NumPy arrays, lists, torch tensors.

        ``input_ids`` is transformers' name of the tokens: ``model(**tokenizer(text, return_tensors="np"))`` works.

        ``attention_mask [B, T]``: nonzero for real tokens, 0 for padding; of these T tokens, not of those in the cache.
        ``positions [B, T]``: rotary positions. Default: 0 … T-1, or with a cache the number of real tokens before.
        ``segment_ids [B, T]``: tokens attend to their own segment only (packed documents). ``cache``: from
        ``empty_cache``. ``key``: random key of the router's jitter, if the config has one; None disables it.

        Compiled when called with arrays, and once more for a prompt with an empty cache; inside a transformation such
        as ``jax.jit`` it is traced like any function. So that few programs serve all lengths, T is rounded up to 64,
        96, 128, 192, … with padding that is removed from the output. T is not rounded on a mesh, if tokens compete
        (`token_independent`), or for one token with a cache. Under ``nnx.capture``, and if a part sows values or sets a
        variable, the call is not compiled, so that the model keeps the values.

        Raises ValueError for ids outside the vocabulary, wrong shapes, a full cache, or a model without values. Inside
        a transformation the length of the cache is unknown, and the logits of rows that do not fit are NaN.
        """
        if (tokens is None) == (input_ids is None):
            raise ValueError("give tokens, or input_ids, which is transformers' name of them, and not both")
        tokens = input_ids if tokens is None else tokens
        inputs = check_inputs(self.vocab_size, tokens, attention_mask, positions, segment_ids)
        lengths, width = lengths_after_pass(inputs, cache), np.shape(inputs.tokens)[1]
        if lengths is not None and positions is None and not isinstance(inputs.tokens, Tracer):
            warn_beyond_positions(self, int(lengths.max()))
        fresh = cache is not None and cache.max_length == 0 and width > 1  # one token is a step of decoding
        options = cache, key, return_routing, return_hidden, fresh
        if is_traced(self, (inputs, cache, key)) or is_stateful(self):
            return self._forward_uncompiled(inputs, *options)
        exact = self.mesh is not None or (cache is not None and width == 1) or not self.token_independent(key)
        program = model_program(self, CausalLM.forward, static=(3, 4, 5))
        out = program(inputs if exact else pad_inputs(inputs), *options)
        if is_stateful(self):  # found by tracing the program
            return self._forward_uncompiled(inputs, *options)
        if lengths is not None and out.cache is not None:
            out.cache.remember_lengths(lengths)
        return out if exact else remove_padding(out, width, all_real=inputs.attention_mask is None)

    def _forward_uncompiled(self, inputs: ModelInputs, *options: Any) -> Output:
        try:
            return self.forward(inputs, *options)
        except (TypeError, jax.errors.InconclusiveDimensionOperation) as error:
            if is_static(*np.shape(inputs.tokens)):
                raise
            raise ValueError(  # of jax.export
                f"{type(self).__name__} cannot be exported for tokens {list(np.shape(inputs.tokens))}: give numbers "
                f"in place of the symbols, one program per size ({str(error).splitlines()[0]})"
            ) from error

    def forward(
        self,
        inputs: ModelInputs,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        return_routing: bool,
        return_hidden: bool,
        fresh: bool,
    ) -> Output:
        """Compute the output of a call from arrays. ``fresh``: the cache is empty, see `body`."""
        request = OutputRequest(all_hidden=return_hidden, reduce_routing=None if return_routing else drop_routing)
        body = self.body(*inputs, cache, key, request, fresh=fresh)
        routing, dispatch = None, None
        if return_routing:
            routing = ByLayer({i: info.routing for i, info in body.infos.items()})
            dispatch = ByLayer({i: info.dispatch for i, info in body.infos.items()})
        return Output(self.logits(body.x), body.cache, routing, body.hidden if return_hidden else None, dispatch)

    def body(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        key: Key[Array, ""] | None = None,
        request: OutputRequest = EVERYTHING,
        *,
        fresh: bool = False,
    ) -> Body:
        """Compute everything but the head, for callers that need the logits of some tokens only.

        Args:
            request: What to return. With ``last_token_only``, ``x`` is ``[B, 1, D]``. If the last layer can skip the
                other tokens (but not their keys and values), its ``infos`` and ``hidden`` cover only that token.
            fresh: Promises that the cache is empty, so that its slots are not read.

        Raises:
            ValueError: ``fresh`` is True and the cache is known to have tokens.
        """
        caches = (None,) * len(self.stacks) if cache is None else cache.layers
        shared = None if cache is None else cache.shared(fresh)
        embedded, context, cache = self.embed_inputs(
            tokens, attention_mask, positions, segment_ids, shared, key, fresh=fresh
        )
        context = dataclasses.replace(context, request=request)
        x, outputs = embedded, []
        for i, (stack, stack_cache) in enumerate(zip(self.stacks, caches, strict=True)):
            last_only = request.last_token_only and i + 1 == len(self.stacks)
            outputs.append(stack(x, context.for_layer(i, last_token_only=last_only), stack_cache))
            x = outputs[-1].x
        out = concatenate_layers(x, outputs, [stack.depth for stack in self.stacks])
        x = self.from_layer_output(x)
        hidden_states = x if cache is None else cache.nan_if_full(x)
        normalized = self.norm(hidden_states[:, -1:] if request.last_token_only else hidden_states)
        hidden = ()
        if request.all_hidden:
            hidden = (*map(self.from_layer_output, (embedded, *out.hidden)), normalized)
        mtp_hidden = self.mtp_hidden(x[:, -1:] if request.last_token_only else x, normalized)
        cache = None if cache is None else dataclasses.replace(cache, layers=out.cache)
        return Body(normalized, cache, out.infos, hidden, mtp_hidden)

    def embed_inputs(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None,
        positions: Ids | None,
        segment_ids: Ids | None,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        *,
        fresh: bool,
    ) -> tuple[Any, Context, Cache | None]:
        """Return the input of the first layer, the context of the layers, and the cache with the tokens counted in."""
        tokens, masks = jnp.asarray(tokens), (attention_mask, positions, segment_ids)
        context, cache = Context.from_inputs(self.ropes, tokens, *masks, cache, key, fresh)
        embedded = shard_batch(self.embed(tokens, self.dtype), self.mesh)
        return self.to_layer_input(embedded, tokens), context, cache

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Apply the output head: logits in float32."""
        if self.head is not None and not hasattr(self.head, "weight"):  # a replaced part
            return self.head(x).astype(jnp.float32)
        return self.head_weight().matmul_f32(x)

    def head_weight(self) -> Kernel:
        """Return the kernel ``[D, V]`` of the output head, or the embedding's table if the two are tied. Raises
        ValueError for a replaced part without ``weight``."""
        name, part = ("embed", self.embed) if self.head is None else ("head", self.head)
        if not hasattr(part, "weight"):
            raise ValueError(f"model.{name}, a {type(part).__name__}, must define weight(), which returns its Kernel")
        return part.weight()

    @property
    def vocab_size(self) -> int:
        """Number of token ids: rows of the embedding's table, or the config's value if the embedding has no table."""
        table = getattr(self.embed, "table", None)
        return self.config.vocab_size if table is None else int(table.shape[0])

    def token_independent(self, key: Key[Array, ""] | None = None) -> bool:
        """Whether tokens influence each other by attention only, so that a pass may be split, or padded with tokens
        that are not real, without another result. Not so with `Capacity`, where they compete for slots."""
        return all(stack.token_independent(key) for stack in self.stacks)

    def empty_cache(self, batch: int, capacity: int, lookahead: int = 0) -> Cache:
        """A cache for ``capacity`` real tokens per row, in the activations' dtype or in the strategy's format.

        ``lookahead``: how many of the newest tokens of a row may be taken back, by a smaller ``length``.
        """
        layers = tuple(stack.empty_cache(batch, capacity, self.dtype, lookahead) for stack in self.stacks)
        return self.cache_of(layers, batch, capacity)

    def cache_of(self, layers: tuple[Any, ...], batch: int, capacity: int) -> Cache:
        """A cache around the layers' empty caches, in the strategy's format."""
        return Cache.empty(format_caches(layers, self.cache_format), batch, capacity)

    @property
    def fixed_positions(self) -> int | None:
        """Positions beyond which a `DynamicRope` rotates by the length of the longest row; None: there is none."""
        return min((rope.max_positions for rope in self.ropes if isinstance(rope, DynamicRope)), default=None)


def check_model(model: Any) -> None:
    """Raise ValueError unless the argument ``model`` is a `CausalLM`."""
    if not isinstance(model, CausalLM):
        raise ValueError(f"model is a {type(model).__name__}: pass an nnxmoe model")
