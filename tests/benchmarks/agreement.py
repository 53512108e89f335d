"""Numbers of an accelerator beside the oracle in float32: attention, grouped products, codes, exchanges, whole models.

Each line is the largest difference relative to the largest value, and its limit; part of ``python -m
tests.benchmarks.gpu``. Small shapes, the same on every backend, with empty groups, windows and padding.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.linear.code_format import FULL, CodeFormat
from nnxmoe.layers.mask import Mask
from nnxmoe.models import config_from_hf, model_class
from nnxmoe.moe.ragged import TransferPlan, ragged_all_to_all
from nnxmoe.sharding import shard_map
from tests.support.codes import random_codes
from tests.support.grouped import product_and_gradients
from tests.support.tiny import ORACLE, TINY, random_tokens

Line = tuple[str, float, float]  # what, difference, limit
Comparison = Callable[[], Line]
CODES = [
    *(
        CodeFormat("int8", (1, FULL)),
        CodeFormat("int8", (1, 64)),
        CodeFormat("int4", (1, 32)),
        CodeFormat("int4", (1, 128)),
    ),
    *(
        CodeFormat("fp8", (128, 128)),
        CodeFormat("fp8", (1, FULL)),
        CodeFormat("fp4", (1, 32)),
        CodeFormat("nf4", (1, 64)),
    ),
]
EXACT, ROUNDED = 2e-4, 3e-2  # float32 with products in float32; bfloat16


def difference(found: Any, wanted: Any) -> float:
    """Largest absolute difference of any leaf, relative to the leaf's largest value; infinite where not finite."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-6)))
    return worst


def compare(name: str, found: Callable[[], Any], wanted: Any, limit: float) -> Comparison:
    """Return a function that compares. A failure is an infinite difference with its reason in the name."""

    def line() -> Line:
        try:
            return name, difference(found(), wanted), limit
        except Exception as error:  # any failure of a kernel is a finding
            return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", float("inf"), limit

    return line


def attention(width: int = 128, length: int = 256) -> Iterator[Comparison]:
    """Compare the default attention in bfloat16, and its gradients, with `ReferenceAttention` in float32."""
    rng, attention_fn = np.random.default_rng(0), nnxmoe.Strategy.auto().attention_fn
    shapes = (2, 8, length, width), (2, 2, length, width), (2, 2, length, width)
    given = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    sinks = jnp.asarray(rng.standard_normal(8), jnp.float32)
    index, stored = jnp.arange(length), jnp.array([[length // 2], [length // 3]])
    valid, segment = index >= jnp.array([[0], [9]]), jnp.stack([index // 50, index // 70])
    masks = {
        "causal": Mask(index, None, SlotMetadata(index, None, None), None, causal=True),
        "window": Mask(index, None, SlotMetadata(index, None, None), 40, causal=True),
        "padded": Mask(index, None, SlotMetadata(index, valid, None), None, causal=True),
        "packed": Mask(index, segment, SlotMetadata(index, None, segment), None, causal=True),
        "packed, window": Mask(index, segment, SlotMetadata(index, None, segment), 40, causal=True),
        "chunk with a cache": Mask(
            stored + index[:64], None, SlotMetadata(jnp.where(index < stored + 64, index, -1), None, None), None
        ),
    }
    cases = [(mask, name, has_sinks) for has_sinks in (False, True) for name, mask in masks.items()]
    for mask, name, has_sinks in cases:
        real = valid[:, None, :, None] if name == "padded" else True
        operands = [given[0][:, :, : mask.query_index.shape[-1]], *given[1:], *[sinks] * has_sinks]
        label = f"{type(attention_fn).__name__}, {name}{', sinks' if has_sinks else ''}"

        def run(attention_fn: Any, operands: Any, mask: Mask = mask, real: Any = real) -> Any:
            def loss(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
                scores = MaskedSoftmax(mask, width**-0.5, None, *sinks)
                out = jnp.where(real, attention_fn(q, k, v, scores), 0).astype(jnp.float32)
                return jnp.sum(jnp.sin(out)), out

            return jax.jit(jax.value_and_grad(loss, tuple(range(len(operands))), has_aux=True))(*operands)

        (_, out), grads = run(nnxmoe.ReferenceAttention(), [x.astype(jnp.float32) for x in operands])
        found = functools.partial(run, attention_fn, operands)
        yield compare(f"{label}, output", lambda: found()[0][1], out, ROUNDED)  # noqa: B023
        yield compare(f"{label}, gradients", lambda: found()[1], grads, ROUNDED)  # noqa: B023


def products(matmuls: dict[str, Any], ins: int = 256, outs: int = 128) -> Iterator[Comparison]:
    """Each grouped product with its gradients, in float32 and bfloat16, with uneven and empty groups."""
    rng = np.random.default_rng(1)
    rows, kernel = rng.standard_normal((200, ins)), rng.standard_normal((6, ins, outs)) / ins**0.5
    for sizes in ([10, 70, 0, 100, 1, 19], [0, 0, 0, 200, 0, 0], [3, 0, 40, 0, 0, 5]):
        for dtype, limit in ((jnp.float32, EXACT), (jnp.bfloat16, ROUNDED)):
            given = jnp.asarray(rows, dtype), jnp.asarray(kernel, dtype), jnp.asarray(sizes, jnp.int32)
            wanted = product_and_gradients(nnxmoe.MaskedMatmul(), *(x.astype(jnp.float32) for x in given[:2]), given[2])
            for name, matmul in matmuls.items():
                label = f"{name}, groups {sizes}, {dtype.__name__}"
                yield compare(label, lambda: product_and_gradients(matmul, *given), wanted, limit)  # noqa: B023


def quantized(matmuls: dict[str, Any]) -> Iterator[Comparison]:
    """Each grouped product with codes of 8 and 4 bits, and the gradient of the rows, in bfloat16."""
    rng, sizes = np.random.default_rng(3), jnp.array([3, 0, 30, 7], jnp.int32)
    rows, weight = (jnp.asarray(rng.standard_normal((44, width)), jnp.float32) for width in (256, 128))
    for codes in CODES:
        kernel = random_codes(codes, 128, 256, zero=codes.code_dtype == "int4", experts=4)

        def run(matmul: Any, rows: Any, kernel: Any = kernel) -> Any:
            def loss(rows: Any) -> Any:
                y = matmul(rows, kernel, sizes).astype(jnp.float32)
                return jnp.sum(y * weight), y

            return jax.jit(jax.value_and_grad(loss, has_aux=True))(rows)

        (_, y), d_rows = run(nnxmoe.MaskedMatmul(), rows)
        for name, matmul in matmuls.items():
            found = lambda matmul=matmul: run(matmul, rows.astype(jnp.bfloat16))  # noqa: E731
            yield compare(f"{name}, {codes}", lambda: (found()[0][1], found()[1]), (y, d_rows), ROUNDED)  # noqa: B023


def exchange() -> Iterator[Comparison]:
    """The ragged exchange and its gradient on a mesh of one device: some rows are not sent."""
    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    rows = jnp.asarray(np.random.default_rng(2).standard_normal((12, 8)), jnp.float32)
    send, receive = (TransferPlan(*(jnp.array([[n]], jnp.int32) for n in side)) for side in ((0, 7, 0), (0, 7, 0)))

    def loss(rows: Any, move: Any) -> Any:
        out = move(rows)
        return jnp.sum(jnp.sin(out) * jnp.arange(1.0, 1 + out.shape[0])[:, None]), out

    def moved(rows: Any) -> Any:
        def body(rows: Any) -> Any:
            return ragged_all_to_all(rows, 15, send, receive, axis="expert", max_rows=7)

        return shard_map(body, mesh, (PartitionSpec(),), PartitionSpec())(rows)

    def plainly(rows: Any) -> Any:
        return jnp.zeros((15, 8)).at[:7].set(rows[:7])

    runs = [jax.jit(jax.value_and_grad(lambda r, m=move: loss(r, m), has_aux=True)) for move in (moved, plainly)]
    yield compare("ragged_all_to_all and its gradient", lambda: runs[0](rows), runs[1](rows), 1e-6)


def models() -> Iterator[Comparison]:
    """Tiny models of four families with the default strategy: logits of a pass, of cached steps, of the engine's ids,
    of int8 and int4 codes, and the gradient of a loss; the oracle's strategy on the CPU is the reference."""
    tokens = np.asarray(random_tokens(2, 24))
    for name in ("llama", "mistral", "mixtral", "deepseek_v3"):
        config = config_from_hf(TINY[name])
        with jax.default_device(jax.devices("cpu")[0]):
            reference = model_class(config)(config, ORACLE, rngs=nnx.Rngs(0))
            wanted = reference(tokens).logits
            ids = nnxmoe.generate(reference, tokens[:, :9], max_new_tokens=12, eos_token_id=None)
        model = maxtext.from_tree(maxtext.to_tree(reference), config)
        yield compare(f"{name}, logits", lambda: model(tokens).logits, wanted, EXACT)  # noqa: B023

        def cached() -> Any:
            out = model(tokens[:, :9], cache=model.empty_cache(2, 24))  # noqa: B023
            found = [out.logits]
            for i in range(9, 24):
                out = model(tokens[:, i : i + 1], cache=out.cache)  # noqa: B023
                found.append(out.logits)
            return jnp.concatenate(found, axis=1)

        yield compare(f"{name}, cached steps", cached, wanted, EXACT)
        yield compare(
            f"{name}, generated ids",
            lambda: nnxmoe.generate(model, tokens[:, :9], max_new_tokens=12, eos_token_id=None),  # noqa: B023
            ids,
            0.0,
        )


def report(matmuls: dict[str, Any], is_late: Callable[[], bool] = lambda: False) -> int:
    """Print every line until ``is_late()``. Return the number of lines that exceed their limit."""
    failed = 0
    for comparisons in (attention(), exchange(), products(matmuls), quantized(matmuls), models()):
        for comparison in comparisons:
            if is_late():
                return failed
            what, found, limit = comparison()
            failed += not found <= limit
            print(f"{'' if found <= limit else 'DIFFERS '}{what}: {found:.1e} (limit {limit:.0e})", flush=True)
    return failed
