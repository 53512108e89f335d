"""Causal language models: token embedding, stacks of decoder layers, final norm and output head."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from nnxmoe.axes import ParamOptions
from nnxmoe.config.arguments import reject_unknown_arguments
from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.frozen import FrozenDict
from nnxmoe.config.rope_parameters import DynamicRope, LengthDependentRope
from nnxmoe.config.validate import floating_dtype
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.cache import Cache, format_caches
from nnxmoe.layers.context import Attention, Context, FeedForward, OutputRequest
from nnxmoe.layers.embed import Embed
from nnxmoe.layers.linear.kernel import Kernel, as_weight
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.layers.stateful import is_stateful
from nnxmoe.model.given_routing import check_routing
from nnxmoe.model.layer import Layer
from nnxmoe.model.layerwise import layerwise_program
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
from nnxmoe.model.stack import run_stacks, stacks_of
from nnxmoe.model.strategy import Strategy, check_arguments
from nnxmoe.model.tree import children
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.sharding import is_static, reduce_gradients_in, shard_batch

AttentionT = TypeVar("AttentionT", bound=Attention)


class CausalLM(nnx.Module):
    """A decoder-only transformer.

    Create a model with ``Mixtral(MixtralConfig(…), nnxmoe.Strategy(…), rngs=nnx.Rngs(0), dtype=…)``.

    A model family is a subclass that sets ``configs`` and defines ``attention`` and ``feed_forward``. A `Family` lists
    the names of the model's weights in checkpoint files. `model_program` compiles functions of a model, and splits the
    model again only if the model's structure has changed.

    Args:
        config: Config of the model, an instance of a class in ``configs``.
        strategy: Execution choices. Defaults to ``Strategy()``.
        rngs: Random keys for initialization. If None, the model is abstract (shapes and dtypes only). On a mesh, each
            device initializes its shards.
        dtype: Floating-point dtype of the parameters, and of the activations unless the strategy sets
            ``compute_dtype``.
        mtp: Whether to add the layers for multi-token prediction (`MTP`). Logits do not depend on these layers.

    Raises:
        ConfigError: The config belongs to a different family, or ``mtp`` is True and the model has no prediction
            layers.
        ValueError: An argument has the wrong type.
    """

    configs: ClassVar[tuple[type[DecoderConfig], ...]]
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm  # Norm before attention and feed-forward, and after the last layer.
    supports_mtp: ClassVar[bool] = False  # Whether checkpoints of the family have multi-token prediction layers.
    config: Any

    def attention(self, index: int, **kw: Unpack[ParamOptions]) -> Attention:
        """Build the attention of layer ``index``. ``kw`` contains ``dtype`` and ``rngs``, as in all builder methods."""
        raise TypeError("a model class must define attention(index, **kw)")

    def feed_forward(self, index: int, **kw: Unpack[ParamOptions]) -> FeedForward:
        """Build the feed-forward of layer ``index``."""
        raise TypeError("a model class must define feed_forward(index, dtype=…, rngs=…)")

    def layer_type(self, index: int) -> Hashable:
        """Return a hashable layer type. Consecutive layers of equal type form a stack.

        By default, the type is a pair: the sliding window, and whether the layer has experts. Override this method if
            layers of the family differ in other respects.
        """
        return self.config.windows[index], self.config.sparse_layers[index]

    def layer(
        self, index: int, form: type[Layer] = Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs | None, **options: Any
    ) -> Layer:
        """Build layer ``index`` as an instance of ``form``. ``options`` are keyword arguments of ``form``."""
        kw = ParamOptions(dtype=dtype, rngs=rngs)
        attention, feed_forward = self.attention(index, **kw), self.feed_forward(index, **kw)
        norm1, norm2 = (self.layer_norm(**kw) for _ in range(2))
        return form(norm1, attention, norm2, feed_forward, **options)

    def to_layer_input(self, x: Float[Array, "B T D"], tokens: Ids) -> PyTree:
        """Convert the embedding ``x`` of ``tokens`` to the input of the first layer.

        The input is ``x``, or a pytree if layers pass more than hidden states to each other.
        """
        return x

    def from_layer_output(self, x: PyTree) -> Float[Array, "B T_out D"]:
        """Extract the hidden states from a layer's output. Inverse of `to_layer_input`."""
        return x

    def mtp_hidden(self, hidden: PyTree, normalized: Float[Array, "B T D"]) -> Float[Array, "B T S"]:
        """Return the states that prediction layers (`MTP`) read.

        Args:
            hidden: Input of the final norm.
            normalized: Output of the final norm.

        Returns:
            States of width S. By default ``normalized``, so S = D.
        """
        return normalized

    def gqa(self, index: int, form: Callable[..., AttentionT] = GQA, *, bias: bool, **options: Any) -> AttentionT:
        """Build grouped-query attention for layer ``index`` from the config.

        Args:
            form: Class to instantiate: `GQA` or a variant with the same arguments.
            bias: Whether the projections of queries, keys and values have biases.
            options: Arguments of `AttentionDims` and ``form`` that override the values from the config.
        """
        c = self.config
        sizes = {"heads": c.num_attention_heads, "kv_heads": c.kv_heads, "head_dim": c.head_width}
        sizes |= {"scale": c.query_scale, "out_bias": None, "value_dim": None}
        dims = AttentionDims(
            c.hidden_size, bias=bias, **{name: options.pop(name, size) for name, size in sizes.items()}
        )
        kw = {"rotary": c.rope, "window": c.windows[index], "attention_fn": self.strategy.attention_fn, **options}
        return form(dims, **kw)

    def moe(self, router: Router, width: int, shared: Callable[[Array], Array] | None = None, **options: Any) -> MoE:
        """Build a mixture-of-experts feed-forward with the strategy's dispatch and matrix product.

        Args:
            router: The router. Its number of outputs is the number of experts.
            width: Intermediate size of each expert.
            shared: Shared experts, or None. Their output is added to the output of the routed experts.
            options: Arguments of `Experts` (``dtype``, ``rngs``, activation, biases) and the ``norm`` of `MoE`.
        """
        s, weight = self.strategy, as_weight(router.kernel)
        (dim,), (count,) = weight.ins, weight.outs
        norm = options.pop("norm", None)
        experts = Experts(dim, width, count, matmul=s.matmul, rules=s.rules, **options)
        return MoE(router, experts, s.dispatch, shared, s.mesh, norm)

    def embedding(self, form: Callable[..., Embed] = Embed, **options: Any) -> Embed:
        """Build the token embedding. If ``tie_word_embeddings`` is set, it is also the output head."""
        c, s = self.config, self.strategy
        return form(c.vocab_size, c.hidden_size, mesh=s.mesh, rules=s.rules, **options)

    def layer_norm(self, **kw: Unpack[ParamOptions]) -> Callable[[Array], Array]:
        """Build the norm before the attention or the feed-forward of a layer."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, **kw)

    def final_norm(self, **kw: Unpack[ParamOptions]) -> RMSNorm:
        """Build the norm after the last layer."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, **kw)

    def output_head(self, **kw: Unpack[ParamOptions]) -> Linear | None:
        """Build the output head. Returns None if the head is the embedding."""
        c = self.config
        return None if c.tie_word_embeddings else Linear((c.hidden_size,), (c.vocab_size,), ("embed", "vocab"), **kw)

    def __init__(
        self,
        config: DecoderConfig,
        strategy: Strategy | None = None,
        *,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike = jnp.float32,
        mtp: bool = False,
    ):
        strategy, param_dtype = strategy or Strategy(), floating_dtype(type(self).__name__, "dtype", dtype)
        check_arguments(type(self), config, strategy, rngs)
        self.config, self.strategy = config, strategy
        build_mtp = self._prediction_layers() if mtp else lambda **kw: []
        self.generation_config = {}
        self.load_report: Any = None
        self.merged: Any = None  # adapters that `nnxmoe.train.lora.merge` has folded into the weights

        def parts(key: Array | None) -> dict[str, Any]:
            kw = ParamOptions(dtype=param_dtype, rngs=None if key is None else nnx.Rngs(key))
            return {
                "embed": self.embedding(**kw),
                "stacks": nnx.List(stacks_of(self, strategy, **kw)),
                "norm": self.final_norm(**kw),
                "head": self.output_head(**kw),
                "mtp": nnx.List(build_mtp(**kw)),
            }

        key = None if rngs is None else rngs.params()
        modules = parts(None if strategy.mesh is not None else key)
        self.mtp: nnx.List[Any] = modules["mtp"]
        self.embed, self.stacks, self.norm, self.head = (modules[name] for name in ("embed", "stacks", "norm", "head"))
        self.dtype, self.mesh = jnp.dtype(strategy.compute_dtype or param_dtype), strategy.mesh
        # XLA:CPU crashes on 16-bit sums in the nested `shard_map` of a pipeline stage (jax 0.10.2).
        self.reduce_dtype = strategy.reduce_dtype if strategy.pipeline is None else jnp.dtype(jnp.float32)
        ropes = (getattr(part, "rotary", None) for _, part in nnx.iter_graph(self.stacks))
        self.cache_format, self.ropes = strategy.cache, tuple(dict.fromkeys(rope for rope in ropes if rope is not None))
        if strategy.mesh is not None:
            strategy.initialize(self, parts, key)

    @property
    def mtp_layer_index(self) -> int:
        """Index of a layer with prediction layers' attention and feed-forward. Defaults to the last layer."""
        return self.config.num_hidden_layers - 1

    def _prediction_layers(self) -> Callable[..., list[Any]]:
        """Return a function ``(dtype, rngs) -> list[MTP]``. The import is local, because few models need the module."""
        from nnxmoe.model.mtp import check_mtp, make_mtp

        check_mtp(depths := getattr(self.config, "num_nextn_predict_layers", 0), self)
        return functools.partial(make_mtp, self, depths)

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(nnx.state(self, nnx.Param))
        count, dtypes = sum(leaf.size for leaf in leaves), sorted({str(leaf.dtype) for leaf in leaves})
        mtp = f" and {len(self.mtp)} prediction layers" if self.mtp else ""
        sizes = f"{self.config.num_hidden_layers} layers{mtp}, {count:,} parameters in {', '.join(dtypes)}"
        return f"{type(self).__name__}({sizes}, {self.strategy.stacking})"

    def __str__(self) -> str:
        """`repr`, followed by one line per module."""
        parts = {name: getattr(self, name) for name in ("embed", "stacks", "norm", "head", "mtp")}
        return "\n".join((repr(self), *children(parts, "  ")))

    @classmethod
    def from_pretrained(cls, path_or_hub_id: str | os.PathLike[str], **options: Any) -> Self:
        """Load a checkpoint with `nnxmoe.from_pretrained`.

        Raises:
            CheckpointError: The checkpoint belongs to a different model class.
        """
        return importlib.import_module("nnxmoe").from_pretrained(path_or_hub_id, expect=cls, **options)

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Default generation options of the checkpoint. Assigning a dict stores a frozen copy."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"generation_config must be a mapping, got {fields!r}")
        self._generation_config = FrozenDict(fields)

    @reject_unknown_arguments
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
        routing: Mapping[int, Any] | Array | np.ndarray | Sequence[Any] | None = None,
        input_ids: Ids | Sequence[Sequence[int]] | None = None,
    ) -> Output:
        """Compute logits ``[B, T, V]`` in float32.

        Calls with arrays are compiled. A prompt with an empty cache has a separate program. Inside a transformation
        such as ``jax.jit`` the call is traced. T is padded to 64, 96, 128, 192, … to limit the number of programs, and
        the padding is removed from the output. T is not padded on a mesh, for a single token with a cache, or if the
        model is not token-independent (see `token_independent`). Calls are not compiled under ``nnx.capture``, or if a
        submodule sows values or sets a variable, because a compiled call would drop these values.

        Args:
            tokens: Token ids ``[B, T]``: a JAX or NumPy array, lists or a torch tensor.
            attention_mask: ``[B, T]``, nonzero for real tokens and 0 for padding. Does not cover cached tokens.
            positions: Rotary positions ``[B, T]``. Defaults to 0 … T-1. With a cache, defaults to the number of
                preceding real tokens.
            segment_ids: ``[B, T]``. Tokens attend only to tokens of the same segment (packed documents).
            cache: A cache from `empty_cache`.
            key: Random key for the router's jitter, if the config has jitter. None disables jitter.
            routing: Experts of the tokens: the routing of an `Output` or `Completion`, expert ids ``[B, T, X]`` by MoE
                layer, or ids ``[B, T, L, X]`` of the L MoE layers. Weights are computed from the current router logits.
                The router selects the experts of tokens with the id -1. Ids of padding are ignored.
            input_ids: Alias of ``tokens``, as in transformers: ``model(**tokenizer(text, return_tensors="np"))`` works.

        Raises:
            ValueError: A token id is outside the vocabulary, a shape is wrong, the cache is full, or the model is
                abstract. Inside a transformation, the cache's length is unknown, so rows that do not fit get NaN
                logits.
        """
        if (tokens is None) == (input_ids is None):
            raise ValueError("pass either tokens or input_ids (the name in transformers), not both")
        tokens = input_ids if tokens is None else tokens
        inputs = check_inputs(self.vocab_size, tokens, attention_mask, positions, segment_ids)
        inputs = inputs._replace(routing=check_routing(self, routing, np.shape(inputs.tokens), inputs.attention_mask))
        lengths, width = lengths_after_pass(inputs, cache), np.shape(inputs.tokens)[1]
        if lengths is not None and positions is None and not isinstance(inputs.tokens, Tracer):
            warn_beyond_positions(self, int(lengths.max()))
        fresh = cache is not None and cache.max_length == 0 and width > 1  # a single token is a decoding step
        options = cache, key, return_routing, return_hidden, fresh
        if is_traced(self, (inputs, cache, key)) or is_stateful(self):
            return self._forward_uncompiled(inputs, *options)
        is_unpadded = self.mesh is not None or (cache is not None and width == 1) or not self.token_independent(key)
        program = (layerwise_program if key is None else model_program)(self, CausalLM.forward, static=(7, 8, 9))
        out = program(*(inputs if is_unpadded else pad_inputs(inputs)), *options)
        if is_stateful(self):  # tracing the program detects stateful modules
            return self._forward_uncompiled(inputs, *options)
        if lengths is not None and out.cache is not None:
            out.cache.remember_lengths(lengths)
        return out if is_unpadded else remove_padding(out, width, all_real=inputs.attention_mask is None)

    def _forward_uncompiled(self, inputs: ModelInputs, *options: Any) -> Output:
        try:
            return self.forward(*inputs, *options)
        except (TypeError, jax.errors.InconclusiveDimensionOperation) as error:
            if is_static(*np.shape(inputs.tokens)):
                raise
            raise ValueError(  # symbolic sizes occur only in jax.export
                f"{type(self).__name__} cannot be exported for symbolic tokens {list(np.shape(inputs.tokens))}: export "
                f"one program per concrete size ({str(error).splitlines()[0]})"
            ) from error

    def forward(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None,
        positions: Ids | None,
        segment_ids: Ids | None,
        routing: ByLayer | None,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        return_routing: bool,
        return_hidden: bool,
        fresh: bool,
    ) -> Output:
        """Compute the output of a call from arrays. Set ``fresh`` only if the cache is empty (see `body`)."""
        request = OutputRequest(all_hidden=return_hidden, reduce_routing=None if return_routing else drop_routing)
        options: dict[str, Any] = {"fresh": fresh, "routing": routing}
        body = self.body(tokens, attention_mask, positions, segment_ids, cache, key, request, **options)
        layer_routing, dispatch = None, None
        if return_routing:
            layer_routing = ByLayer({i: info.routing for i, info in body.infos.items()})
            dispatch = ByLayer({i: info.dispatch for i, info in body.infos.items()})
        return Output(self.logits(body.x), body.cache, layer_routing, body.hidden if return_hidden else None, dispatch)

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
        routing: ByLayer | None = None,
    ) -> Body:
        """Compute the normalized input of the output head, for callers that need logits of only some tokens.

        Args:
            request: Which outputs to return. With ``last_token_only``, ``x`` is ``[B, 1, D]``. If the last layer can
                skip the other tokens (except their keys and values), its ``infos`` and ``hidden`` cover the last token
                only.
            fresh: Whether the cache is known to be empty. Attention then does not read the cache's slots.
            routing: Given expert ids ``[B, T, X]`` by layer, from `check_routing`.

        Raises:
            ValueError: ``fresh`` is True, but the cache is known to contain tokens.
        """
        caches = (None,) * len(self.stacks) if cache is None else cache.layers
        shared_cache = None if cache is None else cache.without_layers(fresh)
        embeddings, context, shared_cache = self._embed_inputs(
            tokens, attention_mask, positions, segment_ids, shared_cache, key, fresh
        )
        context = dataclasses.replace(context, request=request)
        depths = [stack.depth for stack in self.stacks]
        with reduce_gradients_in(self.reduce_dtype or self.dtype, self.mesh):
            out = run_stacks(self.stacks, depths, embeddings, context, caches, routing)
        head_input, hidden, mtp_hidden = self._finish(embeddings, out.x, out.hidden, shared_cache, request)
        cache = None if shared_cache is None else dataclasses.replace(shared_cache, layers=out.cache)
        return Body(head_input, cache, out.infos, hidden, mtp_hidden)

    def _embed_inputs(
        self,
        tokens: Ids,
        attention_mask: TokenMask | None,
        positions: Ids | None,
        segment_ids: Ids | None,
        cache: Cache | None,
        key: Key[Array, ""] | None,
        fresh: bool,
    ) -> tuple[PyTree, Context, Cache | None]:
        """Embed tokens.

        Returns:
            The input of the first layer, the context of the layers, and the cache with its lengths increased by the
            new tokens.
        """
        tokens, masks = jnp.asarray(tokens), (attention_mask, positions, segment_ids)
        context, cache = Context.from_inputs(self.ropes, tokens, *masks, cache, key, fresh)
        embeddings = shard_batch(self.embed(tokens, self.dtype), self.mesh)
        return self.to_layer_input(embeddings, tokens), context, cache

    def _finish(
        self, embeddings: Any, x: Any, layer_outputs: tuple[Any, ...], cache: Cache | None, request: OutputRequest
    ) -> tuple[Float[Array, "B T_out D"], tuple[Array, ...], Array]:
        """Normalize the last layer's output ``x``.

        Returns:
            The normalized states, the hidden states (empty unless requested), and the states for prediction layers.
        """
        x = self.from_layer_output(x)
        last_token_only = request.last_token_only
        hidden_states = x if cache is None else cache.nan_if_full(x)
        head_input = self.norm(hidden_states[:, -1:] if last_token_only else hidden_states)
        hidden = ()
        if request.all_hidden:
            hidden = (*map(self.from_layer_output, (embeddings, *layer_outputs)), head_input)
        return head_input, hidden, self.mtp_hidden(x[:, -1:] if last_token_only else x, head_input)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Compute logits in float32 with the output head."""
        if self.head is not None and not hasattr(self.head, "weight"):  # replaced by a module without a kernel
            return self.head(x).astype(jnp.float32)
        return self.head_weight().matmul_f32(x)

    def head_weight(self) -> Kernel:
        """Return the kernel ``[D, V]`` of the output head, or of the embedding if the head is tied to the embedding.

        Raises:
            ValueError: The head or embedding was replaced by a module without a method ``weight``.
        """
        name, part = ("embed", self.embed) if self.head is None else ("head", self.head)
        if not hasattr(part, "weight"):
            raise ValueError(f"model.{name}, a {type(part).__name__}, must define weight(), which returns its Kernel")
        return part.weight()

    @property
    def vocab_size(self) -> int:
        """Number of token ids: rows of the embedding table, or the config's value if the embedding has no table."""
        table = getattr(self.embed, "table", None)
        return self.config.vocab_size if table is None else int(table.shape[0])

    def token_independent(self, key: Key[Array, ""] | None = None) -> bool:
        """Return whether tokens influence each other only through attention.

        If True, splitting or padding a pass does not change the result. False with `Capacity`, because tokens compete
        for the slots of an expert.
        """
        return all(stack.token_independent(key) for stack in self.stacks)

    def empty_cache(self, batch: int, capacity: int, lookahead: int = 0) -> Cache:
        """Create an empty cache in the activations' dtype or in the strategy's format.

        Args:
            batch: Number of rows.
            capacity: Maximum number of real tokens per row.
            lookahead: Number of newest tokens per row that can be removed again by reducing ``length``.
        """
        layers = tuple(stack.empty_cache(batch, capacity, self.dtype, lookahead) for stack in self.stacks)
        return self.cache_of(layers, batch, capacity)

    def cache_of(self, layers: tuple[PyTree, ...], batch: int, capacity: int) -> Cache:
        """Build a `Cache` from the layers' empty caches, in the strategy's format."""
        return Cache.empty(format_caches(layers, self.cache_format), batch, capacity)

    @property
    def fixed_rope_length(self) -> int | None:
        """Number of positions beyond which the rotary frequencies change. None if the frequencies are constant."""
        return min((rope.max_positions for rope in self.ropes if isinstance(rope, LengthDependentRope)), default=None)

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether the longest row affects the frequencies of all rows beyond `fixed_rope_length`, even with a cache."""
        return any(isinstance(rope, DynamicRope) for rope in self.ropes)


def check_model(model: object) -> None:
    """Raise ValueError unless the argument ``model`` is a `CausalLM`."""
    if not isinstance(model, CausalLM):
        raise ValueError(f"model is a {type(model).__name__}: pass an nnxmoe model")
