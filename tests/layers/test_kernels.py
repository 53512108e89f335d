"""Third-party kernels: parity with the oracle, and the error if they are not installed."""

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxmoe
from nnxmoe import BlockwiseAttention, FlashAttention, FusedAttention, ReferenceAttention
from nnxmoe.layers.attention import fused_attention
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.attention.splash_attention import SplashAttention
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.code_format import FULL, CodeFormat
from nnxmoe.layers.linear.kernel import DenseKernel
from nnxmoe.layers.linear.quantized_products import CastProduct
from nnxmoe.layers.mask import Mask
from nnxmoe.moe import tokamax
from nnxmoe.moe.tokamax import TokamaxMatmul
from nnxmoe.moe.triton import TritonMatmul, TritonProduct
from tests.benchmarks.agreement import difference
from tests.support.arrays import max_error
from tests.support.codes import INS, random_codes, random_kernel
from tests.support.grouped import GROUPS, problem, product_and_gradients
from tests.support.running import PART_TOLERANCE
from tests.support.tiny import build_tiny, random_tokens


class Refused(Exception):
    """Raised by `Refusing` and `Elsewhere`."""


@dataclasses.dataclass(frozen=True)
class Refusing:
    """Stub for ``fallback`` of products."""

    def __call__(self, *given: Any) -> Any:
        raise Refused


@pytest.mark.kernels
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", [name for name, (count, _) in GROUPS.items() if count])
def test_tokamax_equals_the_oracle(name: str, aligned: bool) -> None:
    """Forward and backward with the implementation that tokamax selects on this machine."""
    arrays = problem(name, jnp.float32)
    backend: Any = nnxmoe.AlignedMatmul(TokamaxMatmul(), 8) if aligned else TokamaxMatmul()
    wanted = product_and_gradients(nnxmoe.MaskedMatmul(), *arrays)
    for a, b, what in zip(product_and_gradients(backend, *arrays), wanted, ("y", "d rows", "d kernel"), strict=True):
        assert a.dtype == b.dtype and max_error(a, b) < PART_TOLERANCE, what
        assert np.isfinite(a).all()


@pytest.mark.kernels
def test_model_with_tokamax() -> None:
    tokens = random_tokens(2, 9)
    ours = build_tiny("mixtral", nnxmoe.Strategy(matmul=TokamaxMatmul()))(tokens).logits
    assert max_error(ours, build_tiny("mixtral")(tokens).logits) < PART_TOLERANCE


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((5, 32768, 4096, 14336, 2, 2), (512, 1024, 1024)),
        ((5, 65536, 7168, 2048, 256, 2), (256, 1024, 1024)),  # 256 rows per group
        ((5, 640, 2880, 1408, 8, 2), (128, 1024, 768)),  # no divisors: the least padding
        ((5, 32768, 2048, 768, 128, 4), (256, 512, 384)),  # float32 tiles take twice the memory
        ((6, 32768, 4096, 14336, 2, 2), (512, 1024, 2048)),
        ((6, 32768, 4096, 200, 2, 1), (512, 1024, 200)),
        ((7, 32768, 4096, 14336, 2, 2), None),
    ],
)
def test_tile_sizes(shape: tuple[int, ...], wanted: tuple[int, int, int] | None) -> None:
    found = tokamax.tile_sizes(*shape)
    assert (tuple(found.values()) or None) == wanted and list(found) in ([], ["tile_m", "tile_k", "tile_n"])


@pytest.mark.kernels
@pytest.mark.parametrize("mode", ["tiles", "tuned", "private modules missing"])
def test_tokamax_tiles_on_tpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """The product and both gradients use `tile_sizes` or tokamax's autotuning cache, and log no warnings."""
    modules = tokamax._tpu_modules()
    assert modules is not None
    operator, configs = modules[1].PallasMosaicTpuRaggedDot, list[Any]()
    m, k, n, experts = 2048, 512, 2176, 2

    @functools.wraps(operator._fwd)  # tokamax reads the signature
    def forward(self: Any, lhs: Any, rhs: Any, *, config: Any, **options: Any) -> Any:
        configs.append((config.tile_m, config.tile_k, config.tile_n))
        wide = lhs.shape[1] == k
        return jnp.zeros((experts, k, n) if rhs.ndim == 2 else (m, n if wide else k), lhs.dtype), None

    tuned = types.SimpleNamespace(fastest_config=modules[1].Config(tile_m=64)) if mode == "tuned" else None
    cache = type("Cache", (dict,), {"get": lambda *_: tuned})()
    monkeypatch.setattr(operator, "_fwd", forward)
    monkeypatch.setattr(operator, "supported_on", lambda *_: True)
    monkeypatch.setattr(operator, "get_autotuning_cache", lambda *_: cache)
    monkeypatch.setattr(
        "jax.extend.backend.get_default_device", lambda: mock.Mock(platform="tpu", device_kind="TPU v5")
    )
    monkeypatch.setattr("jax.experimental.pallas.tpu.get_tpu_info", lambda: mock.Mock(generation=5))
    if mode == "private modules missing":
        monkeypatch.setattr(tokamax, "_tpu_modules", lambda: None)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (experts, k, n))]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)

    def loss(rows: Any, kernel: Any, sizes: Any) -> Any:
        return jnp.sum(TokamaxMatmul()(rows, DenseKernel(kernel, ins_first=True), sizes).astype(jnp.float32))

    with caplog.at_level("WARNING"):
        jax.eval_shape(jax.grad(loss, (0, 1)), *shapes, sizes)
    wanted = {"tiles": (512, 512, 768), "tuned": (64, 128, 128), "private modules missing": (128, 128, 128)}[mode]
    assert len(configs) >= 3 and set(configs) == {wanted}
    assert mode == "private modules missing" or not caplog.records


def test_tokamax_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokamax, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=r"pip install -e '.*\[kernels\]'"):
        TokamaxMatmul()


@pytest.mark.parametrize(
    ("backend", "there", "wanted"),
    [
        ("cpu", True, "BlockedMatmul"),
        ("gpu", True, "TritonMatmul"),
        ("tpu", True, "TokamaxMatmul"),
        ("tpu", False, "RaggedDotMatmul"),
    ],
)
def test_default_matmul_per_backend_and_its_explanation(
    monkeypatch: pytest.MonkeyPatch, backend: str, there: bool, wanted: str
) -> None:
    monkeypatch.setattr(tokamax, "is_installed", lambda: there)
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    strategy = nnxmoe.Strategy.auto()
    assert type(strategy.matmul).__name__ == wanted
    line = next(line for line in strategy.explain().splitlines() if line.startswith("matmul"))
    assert wanted in line and "not a default" not in line and line.split(": ", 1)[1]


# The Triton kernel, in Pallas's interpreter

TRITON = TritonMatmul(Refusing(), interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("ins_first", [False, True])
@pytest.mark.parametrize(
    "sizes", [[10, 70, 0, 50, 1, 19], [0, 0, 0, 150, 0, 0], [3, 0, 40, 0, 0, 5], [1, 0, 0, 0, 0, 0]]
)
def test_triton_equals_the_oracle(sizes: list[int], ins_first: bool) -> None:
    """In bfloat16, with gradients of rows and kernel."""
    rng = np.random.default_rng(0)
    count = 150 if sizes[0] != 1 else 1
    rows = jnp.asarray(rng.standard_normal((count, 64)), jnp.bfloat16)
    array = jnp.asarray(rng.standard_normal((6, 64, 48) if ins_first else (6, 48, 64)) / 8, jnp.bfloat16)

    def run(backend: Any, dtype: Any) -> Any:
        def product(rows: Any, kernel: Any, sizes: Any) -> Any:
            return backend(rows, DenseKernel(kernel, ins_first), sizes)

        return product_and_gradients(product, rows.astype(dtype), array.astype(dtype), jnp.asarray(sizes, jnp.int32))

    for a, b in zip(run(TRITON, jnp.bfloat16), run(nnxmoe.MaskedMatmul(), jnp.float32), strict=True):
        assert a.dtype == jnp.bfloat16 and difference(a, b) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(
    "codes",
    [
        *(CodeFormat("int8", (1, FULL)), CodeFormat("int8", (1, 64)), CodeFormat("int8", (FULL, FULL), "bfloat16")),
        *(CodeFormat("int4", (1, 32)), CodeFormat("int4", (1, 128)), CodeFormat("fp4", (1, 32))),
        *(CodeFormat("fp8", (16, 64)), CodeFormat("fp8", (1, FULL))),
    ],
    ids=str,
)
def test_triton_computes_from_codes(codes: CodeFormat, zero: bool) -> None:
    """Of many and of few rows, of one kernel and of one per expert, and the gradient of the rows."""
    rng, sizes = np.random.default_rng(0), jnp.array([3, 0, 30, 7], jnp.int32)
    kernel = random_codes(codes, 48, 128, zero=zero, experts=4)
    rows, weight = (jnp.asarray(rng.standard_normal((44, width)), jnp.bfloat16) for width in (128, 48))

    def product(backend: Any, rows: Any) -> Any:
        y, pull = jax.vjp(lambda rows: backend(rows, kernel, sizes), rows)
        return y, pull(weight.astype(y.dtype))

    wanted = product(nnxmoe.MaskedMatmul(), rows.astype(jnp.float32))
    assert difference(product(TritonMatmul(interpret=True), rows), wanted) < 1e-2
    assert difference(TRITON(rows, kernel, sizes), wanted[0]) < 1e-2
    one, few = kernel.expert(2), rows[:5]
    found = TritonProduct(Refusing(), interpret=True)(few, one)
    assert found.dtype == jnp.float32
    assert difference(found, nnxmoe.DequantizedProduct()(few.astype(jnp.float32), one)) < 1e-2


def test_triton_leaves_the_rest_to_otherwise() -> None:
    """Rows of 32 bits, widths without tiles, kinds and orders that are looked up; and more rows of one kernel."""
    half, sizes = jnp.ones((6, 48), jnp.bfloat16), jnp.array([2, 4])
    wide = jnp.ones((2, 64, 48), jnp.bfloat16)
    for rows, kernel in (
        (half.astype(jnp.float32), DenseKernel(wide)),
        (half[:, :40], DenseKernel(wide[..., :40])),
        (half, random_codes(CodeFormat("nf4", (1, 16)), 64, 48, experts=2)),
        (half, random_codes(CodeFormat("int8", (1, FULL)), 64, 48, experts=2, order=True)),
        (half, random_codes(CodeFormat("int8", (1, 20)), 64, 48, experts=2)),
    ):
        with pytest.raises(Refused):
            TRITON(rows, kernel, sizes)
    one = random_codes(CodeFormat("int8", (1, FULL)), 64, 48)
    for rows in (half.astype(jnp.float32), jnp.ones((17, 48), jnp.bfloat16)):
        with pytest.raises(Refused):
            TritonProduct(Refusing(), interpret=True)(rows, one)


@pytest.mark.wrong_types
def test_triton_product_on_a_mesh() -> None:
    """XLA cannot split the kernel, so that a model on several devices has the other product."""
    strategy = nnxmoe.Strategy(quantized=TritonProduct())
    meshes = jax.sharding.AbstractMesh((1,), ("data",)), jax.sharding.AbstractMesh((2,), ("data",))
    found: list[Any] = [strategy.quantized.with_mesh(mesh, strategy.rules) for mesh in (None, *meshes)]
    assert found == [TritonProduct(), TritonProduct(), CastProduct()]


# Attention


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """Stub for ``fallback``."""

    def __call__(self, q: Any, k: Any, v: Any, scores: MaskedSoftmax) -> Any:
        raise Refused


def mask_of(length: int, window: int | None = None, segments: bool = False, padding: bool = False) -> Mask:
    """Mask of two rows without a cache; padding is on the left."""
    index = jnp.arange(length)
    segment = jnp.stack([index // 50, index // 70]) if segments else None
    valid = index >= jnp.array([[0], [9]]) if padding else None
    return Mask(index, segment, SlotMetadata(index, valid, segment), window, causal=True)


def mask_with(valid: jax.Array, window: int | None = None) -> Mask:
    """Mask of padded rows without a cache, whose indices count the real tokens."""
    index = jnp.cumsum(valid, axis=1) - 1
    return Mask(index, None, SlotMetadata(index, valid, None), window, causal=True)


def operands(length: int, heads: int = 4, kv_heads: int = 2, width: int = 24, v_width: int = 16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    dims = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    return [jnp.asarray(rng.standard_normal((2, n, length, w)), jnp.float32) for n, w in dims]


SPLASHED = {
    "plain": (MaskedSoftmax(mask_of(128), 0.2), False),
    "window, soft cap": (MaskedSoftmax(mask_of(128, window=40), 0.2, softcap=2.0), False),
    "segments and padding": (MaskedSoftmax(mask_of(128, segments=True, padding=True), 0.2), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPLASHED)
def test_splash_equals_reference(case: str) -> None:
    """Pallas's interpreter runs the kernel; outputs and gradients of real tokens."""
    scores, padded = SPLASHED[case]
    real = scores.mask.keys.valid[:, None, :, None] if padded else True

    def loss(arrays: Any, attention_fn: Any) -> Any:
        out = jnp.where(real, attention_fn(*arrays, scores), 0)
        return jnp.sum(jnp.sin(out)), out

    ways = SplashAttention(Elsewhere(), interpret=True), ReferenceAttention()
    ours, wanted = (jax.jit(jax.grad(lambda a, way=way: loss(a, way), has_aux=True))(operands(128)) for way in ways)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert max_error(a, b) < PART_TOLERANCE * max(1.0, float(jnp.abs(b).max()))


def on_a_mesh() -> float:
    """Error of the kernel on a mesh that shards batch and heads."""
    strategy = nnxmoe.Strategy(attention_fn=SplashAttention(Elsewhere(), interpret=True))
    mesh = nnxmoe.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    attention_fn, scores = dataclasses.replace(strategy, mesh=mesh).attention_fn, SPLASHED["segments and padding"][0]
    assert attention_fn.mesh is mesh and dataclasses.replace(strategy, mesh=None).attention_fn.mesh is None
    arrays, real = operands(128), scores.mask.keys.valid[:, None, :, None]
    return max_error(
        *(jax.jit(lambda *a, f=f: f(*a, scores) * real)(*arrays) for f in (attention_fn, ReferenceAttention()))
    )


@pytest.mark.slow
def test_splash_on_a_mesh(eight: Callable[..., Any]) -> None:
    assert eight(on_a_mesh) < PART_TOLERANCE


def test_splash_lowers_to_a_tpu_kernel() -> None:
    """Forward and backward: one kernel each for the output, the slope of q, and those of k and v."""

    def loss(*arrays: Any) -> Any:
        return jnp.sum(SplashAttention(Elsewhere())(*arrays, MaskedSoftmax(mask_of(256, window=200), 0.2)))

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = run.trace(*operands(256)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3 and "256x256" not in text


NOT_SPLASHED = {
    "length": (MaskedSoftmax(mask_of(130), 0.2), 130),
    "sinks": (MaskedSoftmax(mask_of(128), 0.2, sinks=jnp.zeros(4)), 128),
    "window with padding": (MaskedSoftmax(mask_of(128, window=40, padding=True), 0.2), 128),
    "cache": (MaskedSoftmax(dataclasses.replace(mask_of(128), causal=False), 0.2), 128),
}


@pytest.mark.parametrize("case", NOT_SPLASHED)
def test_splash_leaves_the_rest_to_otherwise(case: str) -> None:
    scores, length = NOT_SPLASHED[case]
    with pytest.raises(Refused):
        SplashAttention(Elsewhere())(*operands(length), scores)


def test_cudnn_is_used_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causality, a window and padding need no mask. Masked passes with few queries use ``fallback``."""
    given: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.update(options)
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    attention_fn = FusedAttention("cudnn", Elsewhere(), max_head_dim=128)
    half = [x.astype(jnp.bfloat16) for x in operands(128)]
    assert attention_fn(*half, MaskedSoftmax(mask_of(128, window=40), 0.2)).shape == (2, 4, 128, 16)
    assert given == {"scale": 0.2, "implementation": "cudnn", "is_causal": True, "local_window_size": (39, 0)}
    plain = MaskedSoftmax(mask_of(128), 0.2)
    wide, odd = ([x.astype(jnp.bfloat16) for x in operands(128, width=width)] for width in (136, 20))
    reasons = {"bfloat16": (operands(128), plain), "up to 128, got 136": (wide, plain), "got 20": (odd, plain)}
    widest = [x.astype(jnp.bfloat16) for x in operands(128, width=128)]
    reasons["up to 128, got 128 plus 8 for sinks"] = (widest, MaskedSoftmax(mask_of(128), 0.2, sinks=jnp.zeros(4)))
    reasons["a soft cap"] = (half, MaskedSoftmax(mask_of(128), 0.2, softcap=3.0))
    for reason, (arrays, scores) in reasons.items():
        with pytest.raises(Refused):
            attention_fn(*arrays, scores)
        with pytest.raises(ValueError, match=reason):
            dataclasses.replace(attention_fn, fallback=None)(*arrays, scores)
    given.clear()
    assert attention_fn(*half, MaskedSoftmax(mask_of(128, window=40, padding=True), 0.2)).shape == (2, 4, 128, 16)
    assert given == {"scale": 0.2, "implementation": "cudnn", "is_causal": True, "local_window_size": (39, 0)}
    for options in ({"segments": True}, {"padding": True}):
        few = [x[:, :, :32] for x in half]
        mask = mask_of(32, **options)
        with pytest.raises(Refused):
            attention_fn(*few, MaskedSoftmax(mask, 0.2))
    decoding = MaskedSoftmax(NOT_SPLASHED["cache"][0].mask.select(slice(-1, None), slice(None)), 0.2)
    with pytest.raises(Refused):
        attention_fn(half[0][:, :, -1:], *half[1:], decoding)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_mask_limit_counts_rows_per_device(monkeypatch: pytest.MonkeyPatch, shared: bool, sharded: bool) -> None:
    """Rows without padding and segments share a mask. Other masks are sharded over the batch."""
    monkeypatch.setattr(fused_attention, "MAX_MASK", 128**2)
    mesh = jax.sharding.AbstractMesh((2,), ("data",)) if sharded else None
    attention_fn = FusedAttention("cudnn", Elsewhere(), mesh=mesh)
    q, k, _ = operands(128)
    assert attention_fn._supports_shape(q, k, mask_of(128, segments=not shared)) == (shared or sharded)


SHIFTED = jnp.stack([jnp.arange(128), jnp.maximum(jnp.arange(128) - 68, -1)])
SAME_PROBLEM: dict[str, Mask] = {
    "padding": mask_of(128, padding=True),
    "right padding": mask_with(jnp.arange(128) < jnp.array([[128], [90]])),
    "padded row": mask_with(jnp.ones((2, 128), bool).at[1].set(False)),
    "hole": mask_with(jnp.ones((2, 128), bool).at[1, 30:50].set(False)),
    "window and hole": mask_with(jnp.ones((2, 128), bool).at[1, 30:50].set(False), window=40),
    "window and padding": mask_of(128, window=40, padding=True),
    "segments": mask_of(128, segments=True),
    "segments and padding": mask_of(128, segments=True, padding=True),
    "sinks": mask_of(128),
    "sinks and window": mask_of(128, window=40),
    "sinks and padding": mask_of(128, padding=True),
    "cache": mask_of(128).select(slice(64, None), slice(None)),
    # row 1: 68 empty slots, and four queries without keys
    "empty slots": Mask(SHIFTED[:, 64:], None, SlotMetadata(SHIFTED, None, None), None),
    "sinks and empty slots": Mask(SHIFTED[:, 64:], None, SlotMetadata(SHIFTED, None, None), None),
}


@pytest.mark.parametrize("case", SAME_PROBLEM)
def test_cudnn_gets_the_same_problem(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The arguments of the kernel, evaluated by XLA, give the outputs and gradients of `ReferenceAttention`."""
    kernel = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, **options: kernel(*arrays, **options | {"implementation": "xla"}),
    )
    mask = SAME_PROBLEM[case]
    scores = MaskedSoftmax(mask, 0.2, sinks=jnp.asarray([-2.0, 0.0, 1.3, 4.0]) if "sinks" in case else None)
    q, k, v = (x.astype(jnp.bfloat16) for x in operands(128))
    q = q[:, :, -mask.query_index.shape[-1] :]
    real = jnp.broadcast_to(mask.query_index >= 0, (2, q.shape[2]))
    if mask.keys.valid is not None:
        real &= mask.keys.valid
    real = real[:, None, :, None]
    weights = (jnp.cos(q.astype(jnp.float32)) * real)[..., : v.shape[3]]

    def loss(arrays: Any, attention_fn: Any) -> Any:
        q, k, v, sinks = arrays
        outputs = attention_fn(q, k, v, dataclasses.replace(scores, sinks=sinks)).astype(jnp.float32)
        return jnp.sum(outputs * weights), outputs

    functions = FusedAttention("cudnn", Elsewhere()), ReferenceAttention()
    (ours, outputs), (wanted, reference) = (
        jax.grad(lambda arrays, fn=fn: loss(arrays, fn), has_aux=True)((q, k, v, scores.sinks)) for fn in functions
    )
    assert jnp.isfinite(outputs).all() and max_error(outputs * real, reference * real) < 0.02
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        assert max_error(a, b) < 0.02 * (1 if a.ndim > 1 else max(1.0, float(jnp.abs(b).max())))


def test_gradients_of_sinks_are_summed_in_float32() -> None:
    """4099 is not a bfloat16 number. The sink is not rounded to bfloat16, either."""
    q, k = (jnp.zeros((1, 2, length, 8), jnp.bfloat16) for length in (4099, 2))
    allowed, sinks = jnp.ones((1, 4099, 2), bool), jnp.asarray([0.1234567, 3.3])

    def total(sinks: Any) -> Any:
        queries, keys, *_ = fused_attention._add_sink_key(q, k, k, allowed, sinks)
        products = jnp.einsum("bnth,bnh->bnt", queries, keys[:, :, -2], preferred_element_type=jnp.float32)
        return jnp.sum(products), products[0, :, 0]

    gradient, products = jax.jit(jax.grad(total, has_aux=True))(sinks)
    assert max_error(products, sinks) < 2e-5 and (gradient == 4099).all()


LONG = BlockwiseAttention(long_context=FlashAttention(512, 1024))


@pytest.mark.parametrize(
    ("backend", "capability", "wanted"),
    [
        ("cpu", None, BlockwiseAttention()),
        ("tpu", None, SplashAttention(LONG)),
        ("gpu", "9.0", FusedAttention("cudnn", LONG, max_head_dim=256)),
        ("gpu", "8.9", FusedAttention("cudnn", LONG, max_head_dim=128)),
        ("gpu", "7.5", LONG),
        ("gpu", "gfx942", LONG),
    ],
)
def test_default_attention_per_backend_and_its_explanation(
    monkeypatch: pytest.MonkeyPatch, backend: str, capability: str | None, wanted: Any
) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    monkeypatch.setattr("jax.local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    strategy = nnxmoe.Strategy.auto()
    assert strategy.attention_fn == wanted
    line = next(line for line in strategy.explain().splitlines() if line.startswith("attention_fn"))
    assert repr(wanted) in line and "not a default" not in line


@pytest.mark.wrong_types
def test_invalid_arguments_of_attention_kernels() -> None:
    for make, message in (
        (
            lambda: FusedAttention(fallback=BlockwiseAttention),
            r"FusedAttention\(fallback=.*such as BlockwiseAttention\(\)",
        ),  # pyright: ignore
        (lambda: FusedAttention(max_head_dim=0), r"FusedAttention\(max_head_dim=0\): pass a positive integer"),
        (lambda: SplashAttention(BlockwiseAttention), r"SplashAttention\(fallback=.*such as BlockwiseAttention\(\)"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.kernels
@pytest.mark.parametrize("form", ["int8 channel", "int4 groups", "int4 bfloat16", "fp8 blocks", "nf4"])
def test_tokamax_computes_from_codes(form: str) -> None:
    """Experts' codes, with zero points, an order of the inputs, tiles of several outputs, and gradients of the rows."""
    sizes = jnp.asarray([3, 0, 5])
    kernel = random_kernel(form, experts=3, zero=form == "int4 groups", order=form == "int8 channel")
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((9, INS)), jnp.float32)

    def run(matmul: Any, kernel: Any) -> Any:
        loss = lambda rows: jnp.sum(jnp.sin(matmul(rows, kernel, sizes)))  # noqa: E731
        return jax.jit(lambda rows: (matmul(rows, kernel, sizes), jax.grad(loss)(rows)))(rows)

    for ours, wanted in zip(run(TokamaxMatmul(), kernel), run(nnxmoe.MaskedMatmul(), kernel.dense()), strict=True):
        limit = 1e-4 if kernel.format.round_dtype is None else 5e-3  # qwix does not round weights to the tool's dtype
        assert max_error(ours, wanted) < limit * float(jnp.abs(wanted).max())
