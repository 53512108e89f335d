"""Multi-token prediction layers (DeepSeek-V3 technical report, 2024, section 2.2)."""

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
from nnxmoe.moe.selection import Routing


class MTP(nnx.Module):
    """Depth k of multi-token prediction: ``norm(layer(project([token_norm(token); hidden_norm(state)])))``.

    Combines the state of depth k - 1 at position i with the embedding of token i + k, to predict token i + k + 1. By
    default, depth 1 reads the main model's states after the final norm, as in transformers. Each depth has
    a separate ``norm``. The embedding, rotary embedding and output head are shared with the main model. The paper
    concatenates state and token in the opposite order, but the published weights require this order.
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

    def combine(self, model: Any, embeddings: Float[Array, "B T D"], hidden: Float[Array, "B T D"], tokens: Ids) -> Any:
        """Compute the prediction layer's input: normalize, concatenate and project embeddings and previous states."""
        inputs = jnp.concatenate(
            [self.token_norm(embeddings), self.hidden_norm(hidden.astype(embeddings.dtype))], axis=-1
        )
        return model.to_layer_input(self.project(inputs), tokens)

    @property
    def width(self) -> int:
        """Width of the states that the prediction layer reads."""
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
        """Compute this depth. `CausalLM.body` describes the other arguments.

        Args:
            model: The main model.
            hidden: ``mtp_hidden`` from the `Body` of the main model or of the previous depth.
            tokens: Per position i, the token at position i + k.
            attention_mask: 0 where the row has no token at position i + k.
            cache: Cache of this depth, from `empty_cache`. The tokens of a row can be split over several calls.

        Returns:
            A `Body`. Pass ``x [B, T, D]``, the normalized states, to ``model.logits``. Pass ``mtp_hidden`` to the next
            depth.
        """
        shared_cache = None if cache is None else cache.without_layers(fresh)
        embeddings, context, new_cache = model._embed_inputs(
            tokens, attention_mask, positions, segment_ids, shared_cache, key, fresh=fresh
        )
        embeddings = model.from_layer_output(embeddings)
        context = dataclasses.replace(context, request=OutputRequest(reduce_routing=reduce_routing))
        run = self.layer if self.remat is None else self.remat(self.layer, scanned=False)
        x = self.combine(model, embeddings, hidden, tokens)
        x, layer_cache, info = run(x, context=context, cache=None if cache is None else cache.layers[0])
        x = model.from_layer_output(x)
        normalized = self.norm(x if new_cache is None else new_cache.nan_if_full(x))
        new_cache = None if new_cache is None else dataclasses.replace(new_cache, layers=(layer_cache,))
        return Body(
            normalized, new_cache, ByLayer({} if info is None else {0: info}), (), model.mtp_hidden(x, normalized)
        )

    def empty_cache(self, model: Any, batch: int, capacity: int) -> Cache:
        """Create a cache of this depth for ``capacity`` positions per row, in the main model's cache format."""
        layer = self.layer.empty_cache(batch, capacity, model.dtype)
        return model.cache_of((layer,), batch, capacity)


_MTP_KEY = "layer.mtp.token_norm.scale"  # key of a parameter that every prediction layer has


def has_mtp(config: DecoderConfig, table: Container[str]) -> bool:
    """Return whether the config has prediction layers and the family's ``table`` names their tensors."""
    return _MTP_KEY in table and getattr(config, "num_nextn_predict_layers", 0) > 0


def check_mtp(depths: int, model: Any) -> None:
    """Raise ConfigError if ``depths`` is 0 or the model's family does not support prediction layers."""
    if not model.supports_mtp:
        raise ConfigError(f"{model.config.model_type} models have no multi-token prediction layers")
    if depths < 1:
        raise ConfigError(f"num_nextn_predict_layers {depths}: the model has no multi-token prediction layers")


def last_matching_layer(matches: Iterable[bool]) -> int:
    """Return the index of the last layer that has the attention and feed-forward of prediction layers.

    ``matches`` contains one flag per layer. Raises ConfigError if no layer matches.
    """
    indices = [i for i, match in enumerate(matches) if match]
    if not indices:
        raise ConfigError(
            "no layer has both the attention and the feed-forward of prediction layers: load without prediction layers"
        )
    return indices[-1]


def make_mtp(model: Any, count: int, form: type[MTP] = MTP, *, dtype: Any, rngs: nnx.Rngs | None) -> list[MTP]:
    """Build ``count`` depths of multi-token prediction for a `CausalLM`, as instances of ``form``.

    Raises:
        ConfigError: The model has experts, but the layer at ``model.mtp_layer_index`` is dense.
    """
    config, kw = model.config, {"dtype": dtype, "rngs": rngs}
    depths = [form(model, model.layer(model.mtp_layer_index, **kw), **kw) for _ in range(count)]
    if config.experts and any(depth.layer.feed_forward_name != "moe" for depth in depths):
        raise ConfigError(
            "the last layer is dense, but multi-token prediction layers have experts: check the number of dense layers"
        )
    return depths
