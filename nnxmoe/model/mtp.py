"""Multi-token prediction (DeepSeek-V3 technical report, 2024, section 2.2): layers that predict later tokens."""

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from nnxmoe.config.base import DecoderConfig
from nnxmoe.config.bounds import ConfigError
from nnxmoe.layers.cache import Cache
from nnxmoe.layers.context import OutputRequest
from nnxmoe.layers.linear.linear import Linear
from nnxmoe.model.layer import Layer
from nnxmoe.model.output import Body, ByLayer, Ids, TokenMask
from nnxmoe.moe.router import Routing


class MTP(nnx.Module):
    """Depth k of multi-token prediction: ``norm(layer(project([token_norm(token); hidden_norm(state)])))``.

    The state of depth k - 1 at position i meets the embedding of token i + k, and the result predicts token i + k + 1.
    The main model's states are those after its final norm, as in transformers; ``norm`` is the depth's own. Embedding,
    rotary embedding and output head are the main model's. The paper concatenates in the other order, which does not fit
    the published weights.
    """

    def __init__(self, model: Any, layer: Layer, *, dtype: jnp.dtype, rngs: nnx.Rngs | None):
        config, kw = model.config, {"dtype": dtype, "rngs": rngs}
        dim = config.hidden_size
        self.token_norm, self.hidden_norm = (model.norm_class(dim, config.rms_norm_eps, **kw) for _ in range(2))
        self.project = self.projection(dim, **kw)
        self.layer = layer
        self.norm = model.final_norm(**kw)
        self.remat = model.strategy.remat

    def projection(self, dim: int, **kw: Any) -> Any:
        """Build the projection from [token; state] to the layer's input."""
        return Linear((2 * dim,), (dim,), ("embed", "norm"), **kw)

    def combine(self, model: Any, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"], tokens: Ids) -> Any:
        """Normalize, concatenate and project embeddings and previous states to the input of the prediction layer."""
        both = jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden.astype(embedded.dtype))], axis=-1)
        return model.to_layer_input(self.project(both), tokens)

    @property
    def width(self) -> int:
        """The size of a state."""
        return self.hidden_norm.scale.shape[-1]

    def __call__(
        self,
        model: Any,
        hidden: Float[Array, "B T D"],
        tokens: Ids,
        attention_mask: TokenMask | None = None,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
        cache: Cache | None = None,
        key: Key[Array, ""] | None = None,
        reduce_routing: Callable[[Routing], Any] | None = None,
        *,
        fresh: bool = False,
    ) -> Body:
        """The states of this depth: ``x [B, T, D]`` after its norm, for ``model.logits``, and ``states``, which are
        ``hidden`` of the next depth.

        ``model``: the main model. ``hidden``: the ``states`` of its body, or of the depth before. ``tokens``: of each
        position the token k further on. ``attention_mask``: 0 where the row has no such token. ``cache``: this depth's
        own, from `empty_cache`; pairs may be given a few at a time. Other arguments are those of `CausalLM.body`.
        """
        shared = None if cache is None else cache.shared(fresh)
        embedded, context, moved = model.embed_inputs(
            tokens, attention_mask, positions, segment_ids, shared, key, fresh=fresh
        )
        embedded = model.from_layer_output(embedded)
        context = dataclasses.replace(context, request=OutputRequest(reduce_routing=reduce_routing))
        run = self.layer if self.remat is None else self.remat(self.layer, scanned=False)
        x = self.combine(model, embedded, hidden, tokens)
        x, stored, info = run(x, context=context, cache=None if cache is None else cache.layers[0])
        x = model.from_layer_output(x)
        end = self.norm(x if moved is None else moved.nan_if_full(x))
        moved = None if moved is None else dataclasses.replace(moved, layers=(stored,))
        return Body(end, moved, ByLayer({} if info is None else {0: info}), (), model.mtp_hidden(x, end))

    def empty_cache(self, model: Any, batch: int, capacity: int) -> Cache:
        """A cache of this depth for ``capacity`` positions per row, in the format of the main model's."""
        layer = self.layer.empty_cache(batch, capacity, model.dtype)
        return model.cache_of((layer,), batch, capacity)


_MTP_KEY = "layer.mtp.token_norm.scale"  # the key of a tensor that all such layers have


def has_mtp(config: DecoderConfig, table: Container[str]) -> bool:
    """Whether a config asks for such layers, and the family's ``table`` has names for them."""
    return _MTP_KEY in table and getattr(config, "num_nextn_predict_layers", 0) > 0


def check_mtp(depths: int, model: Any) -> None:
    """Raise ConfigError if a model has no depths, or if its family has no prediction layers."""
    if not model.supports_mtp:
        raise ConfigError(f"{model.config.model_type} models have no multi-token prediction layers")
    if depths < 1:
        raise ConfigError(f"num_nextn_predict_layers {depths}: the model has no multi-token prediction layers")


def last_matching_layer(matches: Iterable[bool]) -> int:
    """Return the index of the last layer with the parts of prediction layers. Raises ConfigError if none matches."""
    numbers = [i for i, match in enumerate(matches) if match]
    if not numbers:
        raise ConfigError(
            "no layer has both the attention and the feed-forward of prediction layers: load without them"
        )
    return numbers[-1]


def make_mtp(model: Any, count: int, form: type[MTP] = MTP, *, dtype: Any, rngs: nnx.Rngs | None) -> list[MTP]:
    """``count`` depths of this ``form`` for a `CausalLM`. Raises ConfigError if their layers have no experts in a model
    with some."""
    config, kw = model.config, {"dtype": dtype, "rngs": rngs}
    depths = [form(model, model.layer(model.mtp_layer_index, **kw), **kw) for _ in range(count)]
    if config.experts and any(depth.layer.feed_forward_name != "moe" for depth in depths):
        raise ConfigError(
            "the last layer is dense, and multi-token prediction layers have experts: check the number of dense layers"
        )
    return depths
