"""Models that differ from their config: every writer raises, names the difference and writes nothing."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.convert.arrays import config_mismatch
from nnxmoe.models import GptOss, GptOssConfig, Mixtral, MixtralConfig
from nnxmoe.moe.router import Router

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
TOKENS = np.arange(12)[None]


def model_of(strategy: nnxmoe.Strategy | None = None, **fields: Any) -> Any:
    return Mixtral(MixtralConfig(**SIZES | fields), strategy, rngs=nnx.Rngs(0))


def second_moe(model: Any) -> Any:
    return model.stacks[0].layers[1].moe


def prune(model: Any) -> None:
    layers = model.stacks[0].layers
    model.stacks[0].layers = nnx.List([layers[0], layers[2]])


def resize_vocabulary(model: Any) -> None:
    model.embed.table.set_value(jnp.zeros((48, 16)))


def remove_expert(model: Any) -> None:
    moe = second_moe(model)
    moe.router.kernel.set_value(moe.router.kernel[...][:-1])
    for name in ("gate", "up", "down"):
        kernel = getattr(moe.experts, name)
        kernel.set_value(kernel[...][:-1])


def choose_one_expert(model: Any) -> None:
    second_moe(model).router.select = dataclasses.replace(second_moe(model).router.select, k=1)


class CustomRouter(Router):
    """A different class with the same parameters."""


def change_class(model: Any) -> None:
    second_moe(model).router.__class__ = CustomRouter


def tie_head(model: Any) -> None:
    model.head = None


def add_parameter(model: Any) -> None:
    model.value = nnx.Param(jnp.zeros(3))


def add_dropout(model: Any) -> None:
    model.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(0))


def narrow(model: Any) -> None:
    model.embed.table.set_value(model.embed.table[...].astype(jnp.float8_e4m3fn))


def change_theta(model: Any) -> None:
    model.config = dataclasses.replace(model.config, rope_theta=77.0)


MISFITS: dict[Callable[[Any], None], str] = {
    prune: r"it has 2 layers, but num_hidden_layers is 3",
    resize_vocabulary: r"embed\.table is \[48, 16\], not \[40, 16\]",
    remove_expert: r"experts\.down is \[3, .*not \[4, ",
    choose_one_expert: r"router\.select is SoftmaxTopK\(k=1.*not SoftmaxTopK\(k=2",
    change_class: r"router is a CustomRouter, not a Router",
    tie_head: r"head is missing",
    add_parameter: r"value is unexpected",
    add_dropout: r"dropout is unexpected",
    narrow: r"embed\.table is of dtype float8_e4m3fn",
    change_theta: r"attention\.rotary is Rope\(.*not Rope\(dim=8, theta=77",
}
WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "hf": nnxmoe.save_pretrained,
    "native": nnxmoe.save,
    "maxtext": maxtext.save,
}


@pytest.mark.slow
@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__)
def test_model_that_does_not_fit_its_config_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    model = model_of()
    change(model)
    for name, save in WRITERS.items():
        with pytest.raises(nnxmoe.CheckpointError, match=rf"does not fit its MixtralConfig.*{MISFITS[change]}"):
            save(model, tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_swapped_layers_of_different_types_are_refused(tmp_path: Path) -> None:
    """The parameters have equal shapes. Only the attention windows differ."""
    sizes = SIZES | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    model: Any = GptOss(GptOssConfig(**sizes, sliding_window=5), rngs=nnx.Rngs(0))
    sliding, full = (stack.layers for stack in model.stacks)
    sliding[0], full[0] = full[0], sliding[0]
    with pytest.raises(nnxmoe.CheckpointError, match=r"attention\.window is None, not 5"):
        nnxmoe.save_pretrained(model, tmp_path / "model")
    model.config = dataclasses.replace(model.config, layer_types=("full_attention", "sliding_attention"))
    nnxmoe.save_pretrained(model, tmp_path / "model")
    loaded = nnxmoe.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


@pytest.mark.slow
def test_swapped_layers_of_the_same_type_are_saved(tmp_path: Path) -> None:
    model = model_of()
    layers = model.stacks[0].layers
    layers[0], layers[2] = layers[2], layers[0]
    nnxmoe.save_pretrained(model, tmp_path / "model")
    np.testing.assert_array_equal(nnxmoe.from_pretrained(tmp_path / "model")(TOKENS).logits, model(TOKENS).logits)


REPAIRS: dict[Callable[[Any], None], dict[str, Any]] = {
    prune: {"num_hidden_layers": 2},
    resize_vocabulary: {"vocab_size": 48},
    tie_head: {"tie_word_embeddings": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", REPAIRS, ids=lambda change: change.__name__)
def test_changed_model_with_adapted_config_is_saved(change: Callable[[Any], None], tmp_path: Path) -> None:
    """With the config that the error asks for, the checkpoint loads with equal logits."""
    model = model_of()
    if change is resize_vocabulary:
        model.head.kernel.set_value(jnp.zeros((48, 16)))
    change(model)
    model.config = dataclasses.replace(model.config, **REPAIRS[change])
    for name, load in {"hf": nnxmoe.from_pretrained, "native": nnxmoe.load}.items():
        WRITERS[name](model, tmp_path / name)
        np.testing.assert_array_equal(load(tmp_path / name)(TOKENS).logits, model(TOKENS).logits)


def test_unregistered_class_is_refused(tmp_path: Path) -> None:
    class CustomMixtral(Mixtral):
        """A subclass with the model_type of its base."""

    model = CustomMixtral(MixtralConfig(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(nnxmoe.CheckpointError, match=r"CustomMixtral.*'mixtral'.*Family\(model=CustomMixtral"):
        nnxmoe.save_pretrained(model, tmp_path / "model")


@pytest.mark.slow
def test_mixed_dtypes_are_preserved(tmp_path: Path) -> None:
    model = model_of(nnxmoe.Strategy(stacking=nnxmoe.Scanned()))
    model.embed.table.set_value(model.embed.table[...].astype(jnp.bfloat16))
    for name, load in {"hf": nnxmoe.from_pretrained, "native": nnxmoe.load, "maxtext": maxtext.load}.items():
        WRITERS[name](model, tmp_path / name)
        loaded: Any = load(tmp_path / name)
        assert (loaded.embed.table.dtype, loaded.head.kernel.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_strategy_attributes_and_quantized_kernels_fit(tmp_path: Path) -> None:
    model = model_of()
    second_moe(model).dispatch = nnxmoe.Dense()
    model = nnxmoe.quantize(model, nnxmoe.Int8())
    WRITERS["native"](model, tmp_path / "native")
    np.testing.assert_allclose(nnxmoe.load(tmp_path / "native")(TOKENS).logits, model(TOKENS).logits, atol=1e-5)


@pytest.mark.slow
def test_attributes_may_hold_several_arrays() -> None:
    scales = (np.arange(3), {"x": jnp.ones(2)})
    assert config_mismatch._equal(scales, (np.arange(3), {"x": jnp.ones(2)}))
    assert not config_mismatch._equal(scales, (np.arange(3), {"x": jnp.zeros(2)})) and not config_mismatch._equal(
        scales, None
    )
