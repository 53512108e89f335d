"""``nnxmoe.testing``: equal modules pass, and every difference is reported at the first submodule it affects."""

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax import Array

import nnxmoe
from nnxmoe import linen, testing
from nnxmoe.convert import maxtext
from nnxmoe.layers.attention.gqa import GQA, AttentionDims
from nnxmoe.layers.mlp import MLP
from nnxmoe.layers.norm import RMSNorm
from nnxmoe.models import Llama, LlamaConfig, Mixtral, MixtralConfig
from nnxmoe.testing.parameters import compare_trees
from nnxmoe.testing.sides import NNXSide
from tests.support.running import randomise
from tests.support.tiny import build_tiny, stacking_of

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD = 3, 12, 4, 2, 6


# A Llama in Linen with MaxText's names; ``faults`` maps a layer to its planted fault


class Norm(nn.Module):
    eps: float = 1e-5
    shift: float = 0.0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:]) + self.shift
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.eps) * scale


class Dense(nn.Module):
    outs: tuple[int, ...]
    ins: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        boxed = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("any",) * (self.ins + len(self.outs)))
        kernel = self.param("kernel", boxed, (*x.shape[x.ndim - self.ins :], *self.outs))
        return jnp.tensordot(x, kernel, self.ins)


class Attention(nn.Module):
    rotate: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        q = Dense((HEADS, HEAD), name="query")(x)
        k = Dense((KV_HEADS, HEAD), name="key")(x)
        v = Dense((KV_HEADS, HEAD), name="value")(x)
        if self.rotate:
            q, k = rotated(q), rotated(k)
        k, v = (jnp.repeat(a, HEADS // KV_HEADS, axis=2) for a in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)  # the query kernel includes the scale
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return Dense((WIDTH,), ins=2, name="out")(y)


def rotated(x: Array) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1000.0 ** (-jnp.arange(half) / half)
    cos, sin, a, b = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None], x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Mlp(nn.Module):
    fault: str = ""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.fault == "fused":
            gate, up = jnp.split(Dense((40,), name="wi")(x), 2, axis=-1)
        else:
            gate, up = Dense((20,), name="wi_0")(x), Dense((20,), name="wi_1")(x)
        if self.fault == "swapped":
            gate, up = up, gate
        if self.fault == "gradient":
            up = jax.lax.stop_gradient(up)
        gate = gate if self.fault == "no activation" else jax.nn.silu(gate)
        y = Dense((WIDTH,), name="wo")(gate * up)
        return jnp.where(jnp.arange(WIDTH) == 7, jnp.nan, y) if self.fault == "NaN" else y


class MoeBlock(nn.Module):
    fault: str

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.lecun_normal()
        wi_0, wi_1 = (self.param(name, init, (5, WIDTH, 20)) for name in ("wi_0", "wi_1"))
        wo = self.param("wo", init, (5, 20, WIDTH))
        logits = Dense((5,), name="gate")(x)
        scores, chosen = jax.lax.top_k(-logits if self.fault == "choice" else logits, 2)
        scores = scores * 2 if self.fault == "routing" else scores
        weights = jnp.einsum("btx,btxe->bte", jax.nn.softmax(scores), jax.nn.one_hot(chosen, 5))
        gate, up = jnp.einsum("btd,edf->btef", x, wi_0), jnp.einsum("btd,edf->btef", x, wi_1)
        gate = jax.nn.relu(gate) if self.fault == "activation" else gate
        return jnp.einsum("bte,btef,efd->btd", weights, jax.nn.silu(gate) * up, wo)


class Layer(nn.Module):
    fault: str = ""
    experts: bool = False

    @nn.compact
    def __call__(self, x: Array, _: Any) -> tuple[Array, None]:
        eps = 1e-2 if self.fault == "eps" else 1e-5
        x = x + Attention(self.fault != "no rope", name="self_attention")(Norm(name="pre_self_attention_layer_norm")(x))
        feed = MoeBlock(self.fault, name="MoeBlock_0") if self.experts else Mlp(self.fault, name="mlp")
        return x + feed(Norm(eps, name="post_self_attention_layer_norm")(x)), None


class Decoder(nn.Module):
    faults: Any
    scan: bool
    remat: bool
    layers: int
    experts: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            spec: dict[str, Any] = {"variable_axes": {"params": 1}, "split_rngs": {"params": True}}
            layer = nn.scan(layer, **spec, length=self.layers, metadata_params={nn.PARTITION_NAME: "layers"})
            x, _ = layer(self.faults.get("all", ""), self.experts, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = layer(self.faults.get(i, ""), self.experts, name=f"layers_{i}")(x, None)
        x = Norm(shift=self.faults.get("shift", 0.0), name="decoder_norm")(x)
        return Dense((29,), name="logits_dense")(x * 1.5 if "head" in self.faults else x)


class LinenLlama(nn.Module):
    faults: Any = nn.FrozenDict()
    scan: bool = False
    remat: bool = False
    layers: int = LAYERS
    experts: bool = False

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        x = nn.Embed(29, WIDTH, name="token_embedder")(tokens)
        return Decoder(self.faults, self.scan, self.remat, self.layers, self.experts, name="decoder")(x)


def llama(layers: int = LAYERS, *, experts: bool = False, **strategy: Any) -> nnxmoe.CausalLM:
    fields: dict[str, Any] = {
        "vocab_size": 29,
        "hidden_size": WIDTH,
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rope_theta": 1000.0,
        "rms_norm_eps": 1e-5,
    }
    chosen, rngs = nnxmoe.Strategy(**strategy), nnx.Rngs(0)
    if experts:
        return randomise(
            Mixtral(MixtralConfig(**fields, num_local_experts=5, num_experts_per_tok=2), chosen, rngs=rngs)
        )
    return randomise(Llama(LlamaConfig(**fields), chosen, rngs=rngs))


TOKENS = np.random.default_rng(0).integers(0, 29, (2, 7)).astype(np.int32)
X = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, WIDTH)), jnp.float32)
GATED = {"gate/kernel": "wi_0/kernel", "up/kernel": "wi_1/kernel", "down/kernel": "wo/kernel"}
GROUPED = {"k/kernel": "key/kernel", "v/kernel": "value/kernel", "o/kernel": "out/kernel"}
DIVIDED = GROUPED | {"q/kernel": ("query/kernel", lambda a: a / HEAD**0.5)}


def compare(model: nnxmoe.CausalLM, linen: nn.Module, **options: Any) -> testing.ParityReport:
    return testing.assert_module_parity(model, linen, None, TOKENS, nnx_call=lambda m, t: m(t).logits, **options)


def difference(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Message of the expected AssertionError."""
    with pytest.raises(AssertionError) as caught:
        function(*arguments, **options)
    print(caught.value)
    return str(caught.value)


def attention() -> tuple[GQA, dict[str, Any]]:
    """A GQA module, and the options to call it."""
    rope = llama(1).config.rope
    options: dict[str, Any] = {"rotary": rope, "window": None, "attention_fn": nnxmoe.ReferenceAttention()}
    heads = AttentionDims(WIDTH, HEADS, KV_HEADS, HEAD, bias=False)
    module = GQA(heads, **options, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    context = nnxmoe.Context.from_lengths(rope, 2, 7)
    return module, {"nnx_call": lambda module, x: module(x, context)[0]}


def mlp() -> MLP:
    return MLP(WIDTH, 20, bias=False, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))


class FusedMLP(nn.Module):
    """Gate and up as one product, as in many older code bases; ``swapped``: a planted mistake."""

    swapped: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        gate, up = jnp.split(nn.Dense(40, use_bias=False, name="gate_up")(x), 2, axis=-1)
        gate, up = (up, gate) if self.swapped else (gate, up)
        return nn.Dense(WIDTH, use_bias=False, name="out")(nn.silu(gate) * up)


@pytest.mark.slow
def test_rows_of_several_arrays() -> None:
    """One Linen array from two of NNX, and two Linen arrays from one of NNX; mistakes are found."""
    x = jax.random.normal(jax.random.key(0), (2, 3, WIDTH))
    fused: Any = {
        ("gate/kernel", "up/kernel"): ("gate_up/kernel", lambda gate, up: jnp.concatenate([gate, up], axis=-1)),
        "down/kernel": "out/kernel",
    }
    assert testing.assert_module_parity(mlp(), FusedMLP(), fused, (x,)).parameters == 3
    text = difference(testing.assert_module_parity, mlp(), FusedMLP(True), fused, (x,))
    assert "its inputs already differ" in text and "out" in text  # gate and up have no single counterpart
    text = difference(testing.assert_module_parity, mlp(), FusedMLP(), fused | {"gate/kernel": "gate_up/kernel"}, (x,))
    assert "gate/kernel -> gate_up/kernel: already mapped from gate/kernel + up/kernel" in text
    plain = {("gate/kernel", "up/kernel"): "gate_up/kernel", "down/kernel": "out/kernel"}
    text = difference(testing.assert_module_parity, mlp(), FusedMLP(), plain, (x,))
    assert "gate/kernel + up/kernel -> gate_up/kernel: pass a pair of the name and a function of 2 arrays" in text

    class Halves(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.concatenate([nn.Dense(2, use_bias=False, name=name)(x) for name in ("left", "right")], axis=-1)

    class Whole(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.arange(12.0).reshape(3, 4))

        def __call__(self, x: Any) -> Any:
            return x @ self.kernel[...]

    parts: Any = {"kernel": [("left/kernel", lambda k: k[:, :2]), ("right/kernel", lambda k: k[:, 2:])]}
    assert testing.assert_module_parity(Whole(), Halves(), parts, (jnp.ones((2, 3)),)).parameters == 1
    turned: Any = {"kernel": [("left/kernel", lambda k: k[:, 2:]), ("right/kernel", lambda k: k[:, :2])]}
    assert "outputs" in difference(testing.assert_module_parity, Whole(), Halves(), turned, (jnp.ones((2, 3)),))


@pytest.mark.slow
def test_one_mapping_for_from_linen_and_the_kit() -> None:
    """A mapping of `from_linen`, with functions that scale and split, serves the kit, scanned or not."""
    module, where = (
        LinenLlama(nn.FrozenDict({0: "fused", 1: "fused", 2: "fused", "shift": 0.5})),
        "decoder/layers_{layer}",
    )
    model = llama()
    params = module.init(jax.random.key(1), TOKENS)
    proposed = linen.propose_mapping(model, params)
    assert str(proposed).endswith("? <- decoder/layers_{layer}/mlp/wi/kernel [12, 40]")
    assert "layers/{layer}/mlp/gate/kernel [12, 20] <- ?" in str(proposed)
    mapping: Any = dict(proposed) | {
        "layers/{layer}/attention/q/kernel": (f"{where}/self_attention/query/kernel", lambda q: q * HEAD**0.5),
        "layers/{layer}/mlp/gate/kernel": (f"{where}/mlp/wi/kernel", lambda both: np.split(both, 2, 1)[0]),
        "layers/{layer}/mlp/up/kernel": (f"{where}/mlp/wi/kernel", lambda both: both[:, 20:]),
        "norm/scale": ("decoder/decoder_norm/scale", lambda scale: scale + 0.5),
    }
    for stacking in (nnxmoe.Unrolled(), nnxmoe.Scanned()):
        found = linen.from_linen(params, model.config, nnxmoe.Strategy(stacking=stacking), mapping=mapping)
        report = testing.assert_module_parity(found, module, mapping, TOKENS, nnx_call=lambda m, t: m(t).logits)
        assert report.submodules > LAYERS
    call: Any = {"nnx_call": lambda m, t: m(t).logits}
    turned = mapping | {"layers/{layer}/mlp/up/kernel": (f"{where}/mlp/wi/kernel", lambda both: both[:, :20])}
    text = difference(testing.assert_module_parity, model, module, turned, TOKENS, **call)
    assert "layers/*/mlp/gate/kernel: its function of decoder/layers_*/mlp/wi/kernel cannot be inverted" in text
    short = mapping | {"layers/1/mlp/up/kernel": (f"{where}/mlp/wi/kernel", lambda both: both[:, :3])}
    text = difference(testing.assert_module_parity, model, module, short, TOKENS, **call)
    assert (
        "layers/1/mlp/up/kernel has shape [12, 20], but the value from decoder/layers_1/mlp/wi/kernel has shape [12, 3]"
        in text
    )
    del short["layers/1/mlp/up/kernel"], short["norm/scale"]
    text = difference(testing.assert_module_parity, model, module, short, TOKENS, **call)
    assert "norm/scale [12] has no row" in text and "decoder/decoder_norm/scale float32[12] has no NNX" in text


def test_layers_of_any_module_in_a_mapping() -> None:
    class Ours(nnx.Module):
        def __init__(self) -> None:
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x: Array) -> Array:
            for block in self.blocks:
                x = block(x)
            return x

    class Theirs(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for i in range(3):
                x = nn.Dense(4, name=f"block_{i}")(x)
            return x

    proposed = linen.propose_mapping(Ours(), Theirs().init(jax.random.key(0), jnp.ones((2, 4))))
    assert proposed["blocks/2/bias"] == "block_2/bias"
    mapping = {f"blocks/{{layer}}/{name}": f"block_{{layer}}/{name}" for name in ("kernel", "bias")}
    assert testing.assert_module_parity(Ours(), Theirs(), mapping, (jnp.ones((2, 4)),)).parameters == 6
    text = difference(testing.assert_module_parity, Ours(), Theirs(), {"block/{layer}/bias": "b_{layer}"}, jnp.ones(4))
    assert "block/{layer}/bias -> b_{layer}: NNX has no such parameter" in text


# Parameters of a Linen module in an NNX module


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 20, rngs=rngs, param_dtype=dtype)
        self.down = nnx.Linear(20, WIDTH, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + self.dropout(self.down(jax.nn.relu(self.up(self.norm(x)))))


class Blocks(nnx.Module):
    """Blocks in a list, or stacked on axis 0."""

    def __init__(self, stacked: bool, dtype: Any = jnp.float32) -> None:
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs, dtype)))
        rngs = nnx.Rngs(0)
        self.blocks = make(rngs) if stacked else nnx.List([Block(rngs, dtype) for _ in range(3)])

    def __call__(self, x: Array) -> Array:
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
            return x
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: Array, _: Any = None) -> tuple[Array, None]:
        y = nn.Dense(20, name="fc1")(nn.LayerNorm(name="ln")(x))
        return x + nn.Dense(WIDTH, use_bias=False, name="fc2")(nn.relu(y)), None


class LinenBlocks(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if self.scan:
            spec: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(LinenBlock, **spec, length=3)(name="blocks")(x, None)[0]
        for i in range(3):
            x, _ = LinenBlock(name=f"block_{i}")(x)
        return x


ROWS = {"norm/scale": "ln/scale", "norm/bias": "ln/bias", "up/kernel": "fc1/kernel", "up/bias": "fc1/bias"}
ROWS |= {"down/kernel": "fc2/kernel"}


def rows_of(stacked: bool, scan: bool) -> dict[str, Any]:
    ours, theirs = "blocks" if stacked else "blocks/{layer}", "blocks" if scan else "block_{layer}"
    return {f"{ours}/{name}": f"{theirs}/{source}" for name, source in ROWS.items()}


def drawn(scan: bool) -> Any:
    """Variables of the Linen module, without zeros and ones."""
    shapes = jax.eval_shape(LinenBlocks(scan).init, jax.random.key(0), X)
    return jax.tree.map(lambda a: np.random.default_rng(a.ndim).standard_normal(a.shape, np.float32), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_linen_parameters_in_a_module_of_the_user(stacked: bool, scan: bool) -> None:
    """Lists and stacks on either side give the Linen module's output."""
    variables, module = drawn(scan), Blocks(stacked)
    keys = nnx.state(module, nnx.RngState)
    testing.load_linen(module, variables, rows_of(stacked, scan))
    assert jnp.allclose(module(X), jnp.asarray(LinenBlocks(scan).apply(variables, X)), rtol=1e-5, atol=1e-5)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, keys, nnx.state(module, nnx.RngState)))


@pytest.mark.slow
def test_linen_parameters_are_transposed_cast_and_placed() -> None:
    variables, module = drawn(False)["params"], Blocks(True, jnp.bfloat16)
    for block in variables.values():
        block["fc1"]["weight"] = block["fc1"].pop("kernel").T.astype(np.float64)
        block["fc2"] = {"a": block["fc2"]["kernel"][:7], "b": block["fc2"]["kernel"][7:]}
    mapping = rows_of(True, False) | {
        "blocks/up/kernel": ("block_{layer}/fc1/weight", lambda a: a.T),
        "blocks/down/kernel": (("block_{layer}/fc2/a", "block_{layer}/fc2/b"), lambda a, b: np.concatenate([a, b])),
    }
    testing.load_linen(module, jax.tree.map(lambda a: nn.LogicallyPartitioned(a, (None,) * a.ndim), variables), mapping)
    blocks: Any = module.blocks
    assert blocks.up.kernel.dtype == jnp.bfloat16 and isinstance(blocks.up.kernel[...], jax.Array)
    up = np.stack([variables[f"block_{i}"]["fc1"]["weight"].T for i in range(3)])
    np.testing.assert_array_equal(blocks.up.kernel[...], up.astype(jnp.bfloat16))
    down = np.concatenate([variables["block_1"]["fc2"][x] for x in "ab"])
    np.testing.assert_array_equal(blocks.down.kernel[1], down)
    shapes = nnx.eval_shape(lambda: Blocks(True))
    testing.load_linen(shapes, variables, mapping)
    blocks = shapes.blocks
    np.testing.assert_array_equal(blocks.down.kernel[1], down)
    gated = mlp()  # of nnxmoe, whose kernels have another orientation in memory
    kernels = {
        name: np.arange(240.0).reshape(shape) for name, shape in zip("guw", ((12, 20), (12, 20), (20, 12)), strict=True)
    }
    testing.load_linen(gated, kernels, {"gate/kernel": "g", "up/kernel": ("u", list), "down/kernel": "w"})
    want = (jax.nn.silu(X @ kernels["g"]) * (X @ kernels["u"])) @ kernels["w"]
    np.testing.assert_allclose(gated(X), want, rtol=1e-4)


class Constants(nnx.Module):
    """A linear layer, and an array, a number and a tuple that are not parameters."""

    def __init__(self) -> None:
        self.up = nnx.Linear(WIDTH, 20, rngs=nnx.Rngs(0))
        self.table, self.host_table = nnx.data(jnp.ones(2)), nnx.data(np.ones(3))
        self.steps, self.sown = nnx.Variable(3), nnx.Intermediate((jnp.ones(2),))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.up(x) * self.table[0] * self.steps.get_value()


def test_constants_of_a_module_are_not_parameters() -> None:
    """In `load_linen` and in the comparison."""
    linen_module, module = nn.Dense(20), Constants()
    variables = linen_module.init(jax.random.key(1), X)
    rows = {"up/kernel": "kernel", "up/bias": "bias"}
    testing.load_linen(module, variables, rows)
    np.testing.assert_array_equal(module.up.kernel[...], variables["params"]["kernel"])
    assert module.steps.get_value() == 3 and module.table.shape == (2,)
    report = testing.assert_module_parity(module, linen_module, rows, (X,), nnx_call=lambda module, x: module(x) / 3)
    assert report.parameters == 2
    tensor = SimpleNamespace(dtype="torch.float32", shape=(WIDTH, 20))  # a dtype that NumPy does not know
    with pytest.raises(ValueError, match=r"not JAX or NumPy arrays: kernel \(SimpleNamespace\)"):
        testing.load_linen(module, {"kernel": tensor}, rows)


@pytest.mark.slow
def test_every_fault_of_linen_parameters_is_listed() -> None:
    """The module is not changed."""
    variables, module = drawn(False), Blocks(False)
    before = jax.tree.map(jnp.copy, nnx.state(module, nnx.Param))
    tree = variables["params"]
    tree["block_0"]["fc1"]["kernel"] = tree["block_0"]["fc1"]["kernel"].T
    tree["block_1"]["ln"]["scale"] = np.ones(WIDTH, np.int32)
    tree["block_2"]["extra"] = np.ones(3)
    del tree["block_2"]["fc2"]
    mapping = rows_of(False, False) | {"blocks/{layer}/gate": "block_{layer}/gate"}
    del mapping["blocks/{layer}/up/bias"]
    with pytest.raises(ValueError, match="does not convert this Linen tree to Blocks") as caught:
        testing.load_linen(module, variables, mapping)
    for fault in (
        "blocks/0/up/bias [20] has no row in the mapping",
        "blocks/2/down/kernel: the tree has no block_2/fc2/kernel",
        "blocks/{layer}/gate of the mapping is not a parameter of this model",
        "block_2/extra [3] of the tree is not used by any row",
    ):
        assert fault in str(caught.value).replace("*", "0"), fault
    tree["block_2"]["fc2"] = {"kernel": tree["block_0"]["fc2"]["kernel"]}
    mapping = rows_of(False, False) | {"blocks/2/up/bias": ("block_2/extra", lambda a: jnp.resize(a, (20,)))}
    with pytest.raises(ValueError, match="does not convert this Linen tree to Blocks") as caught:
        testing.load_linen(module, variables, mapping)
    for fault in (
        "blocks/0/up/kernel has shape [12, 20], but the value from block_0/fc1/kernel has shape [20, 12]",
        "blocks/1/norm/scale has dtype float32, but the value from block_1/ln/scale has dtype int32",
        "block_2/fc1/bias [20] of the tree is not used by any row",
    ):
        assert fault in str(caught.value), fault
    short = jax.tree.map(lambda a: a[:2], drawn(True))
    with pytest.raises(ValueError, match=r"blocks/fc1/bias \[2, 20\] does not have the 3 layers on axis 0"):
        testing.load_linen(module, short, rows_of(False, True))
    with pytest.raises(ValueError, match=r"blocks/norm/scale has shape \[3, 12\], .* has shape \[2, 12\]"):
        testing.load_linen(Blocks(True), {name: tree[name] for name in ("block_0", "block_1")}, rows_of(True, False))
    with pytest.raises(ValueError, match="has a shape but no values"):
        testing.load_linen(module, jax.eval_shape(lambda: drawn(False)), rows_of(False, False))
    with pytest.raises(ValueError, match=r"module is a Llama: .*for nnxmoe's models, use linen\.from_linen"):
        testing.load_linen(llama(1), variables, {})
    assert jax.tree.all(jax.tree.map(jnp.array_equal, before, nnx.state(module, nnx.Param)))


# Equal modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scan", "linen_scan", "remat"),
    [
        pytest.param(False, False, False, marks=pytest.mark.slow),
        (True, True, True),
        pytest.param(True, False, False, marks=pytest.mark.slow),
        pytest.param(False, True, True, marks=pytest.mark.slow),
    ],
)
def test_models_pass_with_any_layer_stacking(scan: bool, linen_scan: bool, remat: bool) -> None:
    """Every layer is compared, whether scanned, unrolled or rematerialised on either side."""
    model = llama(stacking=stacking_of(scan), remat=nnxmoe.Remat() if remat else None)
    report = compare(model, LinenLlama(scan=linen_scan, remat=remat))
    assert report.parameters == len(jax.tree.leaves(nnx.state(model)))
    assert report.submodules == 3 + 12 * LAYERS
    assert 0 < report.output < 1e-5 and 0 < report.gradient < 1e-5
    assert f"parity: {report.parameters} parameters, 39 calls of submodules; outputs within" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_mixtral_pass_and_routing_fault(scan: bool) -> None:
    """Submodules: embedding, norm and model; per layer two norms, attention, its four kernels, experts, the layer."""
    model = llama(2, experts=True, stacking=stacking_of(scan))
    report = compare(model, LinenLlama(layers=2, experts=True, scan=scan))
    assert report.submodules == 3 + 2 * 9 and report.gradient < 1e-5
    text = difference(compare, model, LinenLlama(nn.FrozenDict({1: "routing"}), layers=2, experts=True))
    ours = "stacks/0/layer/moe [layer 1 of 2]" if scan else "stacks/0/layers/1/moe"
    assert f"DIFFER {ours} = decoder/layers_1/MoeBlock_0  " in text and "the cause is inside it" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        ("routing", [r"expert outputs equal", r"routing equal", r"weights differ: token \d+ has .* \(sum 1\) in NNX"]),
        ("choice", [r"expert outputs equal", r"routing differs in \d+ of 14 tokens: token \d+ has the experts \["]),
        ("activation", [r"expert outputs differ .*: Linen's output is not a weighted sum of NNX's"]),
    ],
)
def test_differing_step_of_a_moe_block_is_named(fault: str, lines: list[str]) -> None:
    """The second layer's block, which Linen computes with einsums only; also in a scan."""
    for stacking in (nnxmoe.Unrolled(), nnxmoe.Scanned()):
        model = llama(2, experts=True, stacking=stacking)
        text = difference(compare, model, LinenLlama(nn.FrozenDict({1: fault}), layers=2, experts=True))
        assert "decoder/layers_1/MoeBlock_0:\n" in text and re.search(".*\n *".join(lines), text)


@pytest.mark.slow
def test_exchanged_parameters_are_named() -> None:
    """Norms of equal shapes in all layers, kernels, and modules with several parameters."""
    model, tokens = llama(2), {"nnx_call": lambda m, t: m(t).logits}
    linen_model = LinenLlama(layers=2)
    proposed = linen.propose_mapping(model, linen_model.init(jax.random.key(0), TOKENS))
    query = "decoder/layers_{layer}/self_attention/query/kernel"
    mapping = proposed | {"layers/{layer}/attention/q/kernel": (query, lambda q: q * HEAD**0.5)}
    norms = [f"layers/{{layer}}/{name}_norm/scale" for name in ("attention", "mlp")]
    turned = mapping | {norms[0]: mapping[norms[1]], norms[1]: mapping[norms[0]]}
    text = difference(testing.assert_module_parity, model, linen_model, turned, TOKENS, **tokens)
    where = "decoder/layers_{layer}/%s_self_attention_layer_norm"
    assert re.search(
        f"agree if Linen's {where % 'pre'}(/scale)? and {where % 'post'}(/scale)? are exchanged", text
    ) or (re.search(f"agree if Linen's {where % 'post'}(/scale)? and {where % 'pre'}(/scale)? are exchanged", text))
    gated = GATED | {"gate/kernel": "wi_1/kernel", "up/kernel": "wi_0/kernel"}
    text = difference(testing.assert_module_parity, mlp(), Mlp(), gated, X)
    assert re.search("agree if Linen's wi_[01](/kernel)? and wi_[01](/kernel)? are exchanged", text)
    assert "exchanged" not in difference(testing.assert_module_parity, mlp(), Mlp("no activation"), GATED, X)


@pytest.mark.slow
def test_single_modules_pass() -> None:
    norm = randomise(RMSNorm(WIDTH, 1e-5, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    assert testing.assert_module_parity(norm, Norm(), {"scale": "scale"}, X).submodules == 1
    assert testing.assert_module_parity(mlp(), Mlp(), GATED, (X,)).submodules == 4
    module, how = attention()
    assert testing.assert_module_parity(module, Attention(), DIVIDED, (X,), **how).submodules == 5


@pytest.mark.slow
def test_comparison_does_not_modify_the_modules() -> None:
    model = llama(1)
    before = nnx.split(model)[0]
    compare(model, LinenLlama(layers=1))
    assert nnx.split(model)[0] == before and type(model.norm) is RMSNorm and not hasattr(model.norm, "_tap")


def test_rng_state_is_not_a_parameter() -> None:
    class Ours(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(1))

        def __call__(self, x: Array) -> Array:
            return self.dropout(self.dense(x))

    mapping = {"dense/kernel": "kernel", "dense/bias": "bias"}
    assert testing.assert_module_parity(Ours(), nn.Dense(5), mapping, X).parameters == 2


def test_equal_infinities_pass() -> None:
    ours, theirs = (lambda m, x: jnp.where(x > 1, -jnp.inf, m(x)) for _ in range(2))
    report = testing.assert_module_parity(mlp(), Mlp(), GATED, X, nnx_call=ours, linen_call=theirs)
    assert report.output < 1e-5


def test_vectorised_submodules() -> None:
    """Three experts under each framework's vmap; every one is compared."""

    class Experts(nnx.Module):
        def __init__(self) -> None:
            self.expert = nnx.vmap(lambda key: nnx.Linear(WIDTH, 5, rngs=nnx.Rngs(key)))(
                jax.random.split(jax.random.key(0), 3)
            )

        def __call__(self, x: Array) -> Array:
            return nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.expert, x)

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            experts = nn.vmap(
                nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
            )
            return experts(5, name="experts")(x)

    mapping = {f"expert/{name}": f"experts/{name}" for name in ("kernel", "bias")}
    assert testing.assert_module_parity(Experts(), Linen(), mapping, X).submodules >= 3


class Compiled(nnx.Module):
    """Calls one submodule under ``nnx.jit``."""

    def __init__(self) -> None:
        self.first, self.second = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))

    @nnx.jit
    def start(self, x: Array) -> Array:
        return self.first(x)

    def __call__(self, x: Array) -> Array:
        return self.second(self.start(x))


class Wrapped(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return Dense((WIDTH,), name="inner")(x)


class LinenCompiled(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        return Dense((WIDTH,), name="second")(nn.jit(Wrapped)(name="first")(x))


def test_jitted_and_wrapped_submodules() -> None:
    """Earlier compiled calls are not reused, and a module is compared with the wrapper of its counterpart."""
    mapping: dict[str, Any] = {"first/kernel": "first/inner/kernel", "second/kernel": "second/kernel"}
    ours, theirs = Compiled(), LinenCompiled()
    for _ in range(2):
        assert testing.assert_module_parity(ours, theirs, mapping, X).submodules == 3
    text = difference(testing.assert_module_parity, ours, theirs, mapping, X, linen_call=lambda m, x: m(2 * x))
    assert "DIFFER first = first  " in text


# Reported differences


LAYER = "stacks/0/layers/1/"
THERE = "decoder/layers_1/"
PARTINGS = {
    "swapped": (
        "mlp/up = decoder/layers_1/mlp/wi_1",
        "mlp/down = decoder/layers_1/mlp/wo",
        "is before it",
    ),
    "no activation": (
        "mlp/up = decoder/layers_1/mlp/wi_1",
        "mlp/down = decoder/layers_1/mlp/wo",
        "is before it",
    ),
    "no rope": (
        "attention/v = decoder/layers_1/self_attention/value",
        "attention/o = decoder/layers_1/self_attention/out",
        "is before it",
    ),
    "eps": (
        "attention = decoder/layers_1/self_attention",
        "mlp_norm = decoder/layers_1/post_self_attention_layer_norm",
        "is inside it",
    ),
    "NaN": ("mlp/down = decoder/layers_1/mlp/wo", "mlp = decoder/layers_1/mlp", "is inside it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PARTINGS)
def test_first_differing_submodule_is_named(fault: str) -> None:
    """Layer 1 of 3 is faulty; the report names the last agreeing and first differing submodule."""
    text = difference(compare, llama(), LinenLlama(nn.FrozenDict({1: fault})))
    agree, part, cause = PARTINGS[fault]
    assert text.startswith("NNX Llama and Linen LinenLlama differ in their outputs (tolerance 1.0e-05):\n  output ")
    assert f"agree  {LAYER}{agree}  " in text and f"DIFFER {LAYER}{part}  " in text and cause in text
    assert ("  inf at [0, 0, 7]: NNX" in text and "Linen nan" in text) == (fault == "NaN")
    assert ("maybe  stacks/0/layers/1/attention/q = " in text) == (fault == "no rope")  # the mapping divides it
    assert "39 calls" in text


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "linen_scan"), [(True, False), (True, True), (False, True)])
def test_differing_layer_of_a_scan_is_named(scan: bool, linen_scan: bool) -> None:
    """Scanned Linen layers are identical, so there the first layer is faulty."""
    i = 0 if linen_scan else 1
    linen = LinenLlama(nn.FrozenDict({"all": "eps", 1: "eps"}), scan=linen_scan)
    text = difference(compare, llama(stacking=stacking_of(scan)), linen)
    ours = f"stacks/0/layer/mlp_norm [layer {i} of 3]" if scan else f"stacks/0/layers/{i}/mlp_norm"
    name = "post_self_attention_layer_norm"
    theirs = f"decoder/layers/{name} [layer {i} of 3]" if linen_scan else f"decoder/layers_{i}/{name}"
    assert f"DIFFER {ours} = {theirs}  " in text


def test_difference_outside_submodules() -> None:
    text = difference(compare, llama(1), LinenLlama(nn.FrozenDict({"head": True}), layers=1))
    assert "agree  norm = decoder/decoder_norm  " in text and "DIFFER the whole module = the whole module  " in text


def test_difference_after_the_last_submodule() -> None:
    text = difference(testing.assert_module_parity, mlp(), Mlp(), GATED, X, linen_call=lambda m, x: m(x) + 1)
    assert (
        "agree  the whole module = the whole module  " in text
        and "this is the last call: the cause is after it" in text
    )


def test_difference_without_corresponding_submodules() -> None:
    class Squared(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.ones((WIDTH, 3)))

        def __call__(self, x: Array) -> Array:
            return (x @ self.kernel[...]) ** 2

    arguments = (Squared(), Dense((3,)), {"kernel": "kernel"}, X)
    text = difference(testing.assert_module_parity, *arguments, nnx_call=lambda m, x: x @ m.kernel[...] + 1)
    assert "no submodules correspond" in text


def test_wrong_mapping_functions_are_found() -> None:
    """A transposed square kernel and undivided queries have the right shapes but wrong values."""

    class Ours(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x: Array) -> Array:
            return self.second(self.first(x))

    linen = nn.Sequential([nn.Dense(WIDTH, use_bias=False) for _ in range(2)])
    mapping: dict[str, Any] = {"first/kernel": "layers_0/kernel", "second/kernel": "layers_1/kernel"}
    assert testing.assert_module_parity(Ours(), linen, mapping, X).submodules == 3
    mapping["second/kernel"] = ("layers_1/kernel", lambda a: a.T)
    text = difference(testing.assert_module_parity, Ours(), linen, mapping, X)
    assert "agree  first = layers_0  0\n" in text and "maybe  second = layers_1  " in text
    assert (
        "(perhaps intended: the mapping changes its parameters)\n    DIFFER the whole module = the whole module  "
        in text
    )
    module, how = attention()
    arguments = (module, Attention(), GROUPED | {"q/kernel": "query/kernel"}, X)
    text = difference(testing.assert_module_parity, *arguments, **how)
    assert "agree  v = value  " in text and "DIFFER o = out  " in text


def test_nan_on_both_sides_fails() -> None:
    def nan(module: Any, x: Array) -> Array:
        return module(x).at[1, 2, 3].set(jnp.nan)

    text = difference(testing.assert_module_parity, mlp(), Mlp(), GATED, X, nnx_call=nan, linen_call=nan)
    assert "output inf at [1, 2, 3]: NNX nan, Linen nan" in text


def test_tolerance_is_relative_to_the_largest_value() -> None:
    norm = RMSNorm(WIDTH, 1e-5, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    arguments = (norm, Norm(1.2e-4), {"scale": "scale"}, X)
    text = difference(testing.assert_module_parity, *arguments)
    error = float(re.search(r"output (\S+) at", text)[1])  # pyright: ignore[reportOptionalSubscript]
    assert 1e-5 < error < 1e-3
    assert testing.assert_module_parity(*arguments, tolerance=1e-2).output == pytest.approx(error, rel=0.1)
    large: dict[str, Any] = {"nnx_call": lambda m, x: 1000 * m(x) + 1e-3, "linen_call": lambda m, x: 1000 * m(x)}
    assert testing.assert_module_parity(norm, Norm(), {"scale": "scale"}, X, **large).output < 1e-5


# Gradients


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_differing_gradient_nearest_to_the_output_is_named(scan: bool) -> None:
    """Outputs are equal, and so are gradients of parameters after the fault."""
    linen = LinenLlama(nn.FrozenDict({1: "gradient"}))
    text = difference(compare, llama(stacking=stacking_of(scan)), linen)
    assert "differ in their gradients (tolerance 1.0e-05); their outputs agree:" in text
    up, down = (
        f"stacks/0/layer/mlp/{name}/kernel [layer 1 of 3]" if scan else f"{LAYER}mlp/{name}/kernel"
        for name in ("up", "down")
    )
    assert f"agree  {down}  " in text and f"DIFFER {up}  " in text and "Linen 0\n" in f"{text}\n"
    count = re.search(r"(\d+) of 30 differ, the largest is stacks/0/layer", text)
    assert count and 10 < int(count[1]) < 20  # layer 0, layer 1 up to the fault and the embedding


def test_input_gradients_are_compared() -> None:
    stopped: dict[str, Any] = {"linen_call": lambda m, inputs: m(jax.lax.stop_gradient(inputs["x"]))}
    arguments = (mlp(), Mlp(), GATED, ({"x": X},))
    text = difference(testing.assert_module_parity, *arguments, nnx_call=lambda m, inputs: m(inputs["x"]), **stopped)
    assert "1 of 4 differ" in text and "DIFFER input [0]['x']  " in text and "agree  gate/kernel  " in text


# Trees and mappings


def test_error_lists_every_mapping_fault() -> None:
    class Ours(nnx.Module):
        def __init__(self) -> None:
            shapes = {"a": (3, 4), "b": (4, 3), "c": (4,), "d": (4,), "e": (4,), "f": (4,), "g": (5, 2)}
            for name, shape in shapes.items():
                setattr(self, name, nnx.Param(jnp.ones(shape, jnp.bfloat16 if name == "c" else jnp.float32)))

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            for name, shape in {"a": (4, 3), "b": (4, 5), "c": (4,), "d": (4,), "g": (3, 3), "z": (2,)}.items():
                self.param(name, nn.initializers.ones, shape)
            return x

    mapping: dict[str, Any] = {"a": "a", "b": "b", "c": "c", "d": "d", "e": "d", "y": "x", "f": "w"}
    mapping["g"] = ("g", lambda a: a.reshape(3, 3))
    text = difference(testing.assert_module_parity, Ours(), Linen(), mapping | {}, X)
    del mapping["f"]
    text += difference(testing.assert_module_parity, Ours(), Linen(), mapping, X)
    for fault in (
        "NNX Ours and Linen Linen differ in their parameters:",
        "a -> a: the row returns float32[3, 4], but Linen has float32[4, 3]; it looks transposed",
        "b -> b: the row returns float32[4, 3], but Linen has float32[4, 5]\n",
        "c -> c: the row returns bfloat16[4], but Linen has float32[4]",
        "e -> d: already mapped from d",
        "y -> x: NNX has no such parameter",
        "f -> w float32[4]: Linen has no such parameter",
        "NNX's f float32[4] has no row in the mapping",
        "Linen's z float32[2] has no NNX parameter",
        "g -> g: its function fails for float32[5, 2]: ",
    ):
        assert fault in text, fault


@pytest.mark.parametrize("count", [2, 4])
def test_different_numbers_of_layers(count: int) -> None:
    text = difference(compare, llama(), LinenLlama(layers=count))
    if count == 2:
        assert "layers/2/mlp/up/kernel -> decoder/layers_2/mlp/wi_1/kernel float32[12, 20]: Linen has no such" in text
    else:
        assert "Linen's decoder/layers_3/mlp/wi_1/kernel float32[12, 20] has no NNX parameter" in text
    assert len(text.splitlines()) == 1 + 9
    text = difference(compare, llama(), LinenLlama(layers=count, scan=True))
    assert f"wo/kernel: the row returns float32[20, 3, 12], but Linen has float32[20, {count}, 12]\n" in text


LLAMA_3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 16}}),
        ("mixtral", {}),
        ("deepseek_v3", {}),
    ],
)
def test_maxtext_mapping_equals_convert(kind: str, changes: dict[str, Any], scan: bool) -> None:
    """Covers divided and interleaved queries, biases per head, and stacked layers."""
    model = build_tiny(kind, nnxmoe.Strategy(), **changes)
    tree = flatten_dict(maxtext.to_tree(model, scan_layers=scan)["params"], sep="/")
    params = NNXSide(model, lambda model, tokens: model(tokens)).params
    rows = compare_trees("", model, params, tree, None)
    assert rows.keys() == tree.keys() and {name for row in rows.values() for name, _ in row.parts} == params.keys()
    for name, array in tree.items():
        np.testing.assert_allclose(rows[name](params), array, rtol=2**-22, err_msg=name)  # XLA's division
    queries = any("query/kernel" in name for name, row in rows.items() if row.changed)
    keys = any("key/kernel" in name for name, row in rows.items() if row.changed)
    assert queries == (kind != "deepseek_v3") and keys == (kind == "llama")


def test_different_output_structures_and_dtypes() -> None:
    text = difference(testing.assert_module_parity, llama(1), LinenLlama(layers=1), None, TOKENS)
    assert (
        "differ in the structure of their outputs" in text
        and "NNX returns Output of float32[2, 7, 29]\n  Linen returns float32[2, 7, 29]\n" in text
    )
    assert "select the output to compare with nnx_call=lambda m, *x: m(*x).logits" in text
    half: dict[str, Any] = {"linen_call": lambda m, x: m(x).astype(jnp.bfloat16)}
    text = difference(testing.assert_module_parity, mlp(), Mlp(), GATED, X, **half)
    assert "Linen returns bfloat16[2, 7, 12]" in text


def test_unsupported_comparisons() -> None:
    with pytest.raises(ValueError, match="MLP has no MaxText names, as required by mapping=None"):
        testing.assert_module_parity(mlp(), Mlp(), None, X)
    with pytest.raises(ValueError, match="no parameter of the Linen module begins with decoder/") as caught:
        compare(llama(1), FusedMLP())
    assert len(str(caught.value).splitlines()) == 1
    for call in ({}, {"nnx_call": lambda module, x: module(x)[0]}):
        with pytest.raises(ValueError, match=r" argument: 'context', .*Context\.from_lengths"):
            testing.assert_module_parity(attention()[0], Attention(), DIVIDED, (X,), **call)
    with pytest.raises(ValueError, match="the Linen module has variables in batch_stats, but only"):
        testing.assert_module_parity(mlp(), nn.BatchNorm(use_running_average=False), {}, X)
    shapes = RMSNorm(WIDTH, 1e-5, dtype=jnp.dtype("float32"), rngs=None)
    with pytest.raises(ValueError, match="the NNX parameter scale has a shape but no values"):
        testing.assert_module_parity(shapes, Norm(), {"scale": "scale"}, X)


@pytest.mark.wrong_types
def test_arguments_that_cannot_be_compared() -> None:
    scale = {"scale": "scale"}
    for arguments, message in (
        ((Norm(), norm(), scale, X), "nnx_module is a Norm: pass an instance of nnx.Module"),
        ((norm(), Norm, scale, X), "linen_module is a type: pass an instance of linen.Module"),
        ((norm(), Norm(), [("scale", "scale")], X), "mapping is a list: pass a dict of names"),
        ((norm(), Norm(), {"scale": 3}, X), "the mapping has scale: 3: pass a Linen name, or a pair"),
        (
            (norm(), Norm(), {"scale": ("scale", None)}, X),
            "the mapping has scale: .* a pair of a Linen name and a function",
        ),
        ((norm(), Norm(), scale, jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)), "has a shape but no values"),
        ((norm(), Norm(), scale, X[:0]), "the outputs have no values to compare"),
    ):
        with pytest.raises(ValueError, match=message):
            testing.assert_module_parity(*arguments)
    for tolerance in (-1e-5, float("nan"), float("inf"), "1e-5", None):
        with pytest.raises(ValueError, match="tolerance must be a finite number from 0"):
            testing.assert_module_parity(norm(), Norm(), scale, X, tolerance=tolerance)
    for make, message in ((lambda a: {}["x"], "fails for .*: KeyError: 'x'"), (lambda a: None, "returns a NoneType")):
        with pytest.raises(AssertionError, match=f"scale -> scale: its function {message}"):
            testing.assert_module_parity(norm(), Norm(), {"scale": ("scale", make)}, X)


@pytest.mark.slow
def test_outputs_without_gradients() -> None:
    """Integer outputs, such as chosen experts, are compared; they have no gradients."""
    choose: dict[str, Any] = {"nnx_call": lambda m, x: m(x).argmax(-1), "linen_call": lambda m, x: m(x).argmax(-1)}
    assert testing.assert_module_parity(norm(), Norm(), {"scale": "scale"}, X, **choose).gradient == 0
    choose["linen_call"] = lambda m, x: m(x).argmin(-1)
    with pytest.raises(AssertionError, match="differ in their outputs"):
        testing.assert_module_parity(norm(), Norm(), {"scale": "scale"}, X, **choose)
    turned: dict[str, Any] = {"nnx_call": lambda m, x: m(x) * 1j, "linen_call": lambda m, x: m(x) * 2j}
    with pytest.raises(ValueError, match=r"outputs have complex64.* real and imaginary parts separately"):
        testing.assert_module_parity(norm(), Norm(), {"scale": "scale"}, X, **turned)


def norm() -> RMSNorm:
    return RMSNorm(WIDTH, 1e-5, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))


@pytest.mark.commands
def test_nnxmoe_does_not_import_testing() -> None:
    code = "import sys, nnxmoe; assert not [n for n in sys.modules if n.startswith('nnxmoe.testing')]"
    subprocess.run([sys.executable, "-c", code], check=True)
