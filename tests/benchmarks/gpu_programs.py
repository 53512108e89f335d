"""The programs of `tests.benchmarks.compiled`: real widths in bfloat16, one layer of each kind, for one H100."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import SingleDeviceSharding

import nnxmoe
from nnxmoe.apps.planning import child
from nnxmoe.apps.planning.compilation import CompileJob
from nnxmoe.apps.planning.work import Work
from nnxmoe.generation import passes
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.mask import Mask
from nnxmoe.model.quantization.methods import parse_method
from nnxmoe.model.quantization.rounding import quantize_structure
from nnxmoe.models import PRESETS, model_class
from nnxmoe.moe.block import MoE
from nnxmoe.moe.experts import Experts
from nnxmoe.moe.router import Router
from nnxmoe.moe.selection import SoftmaxTopK
from nnxmoe.train.lora import add
from tests.benchmarks.moe import Shape

# Two layers: one that computes all outputs, and the last, which computes only those needed. Models with several layer
# types have one layer of each type.
LAYERS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {"num_hidden_layers": 2},
    "mixtral-8x7b": {"num_hidden_layers": 2},
    "qwen3-30b-a3b": {"num_hidden_layers": 2},
    "gpt-oss-20b": {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")},
    "gemma-3-4b": {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")},
    "qwen3.5-35b-a3b": {"num_hidden_layers": 4, "layer_types": None},
    "deepseek-v2-lite": {"num_hidden_layers": 2},
}
MOE = {
    "Mixtral-8x7B": Shape(4096, 14336, 8, 2, "bfloat16"),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8, "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    ``trace(device)`` returns the traced program, and how many bytes of its arguments it never reads.
    """

    name: str
    layers: int
    trace: Callable[[Any], tuple[Any, int]]


def device() -> Any:
    """Return an H100 that is not attached."""
    job = CompileJob(PRESETS["llama-3.1-8b"], nnxmoe.Strategy(), {"fsdp": 4}, Work(1, 128), "gpu", "h100")
    return child.devices(job)[0]


def compile_program(program: Program) -> tuple[str, int]:
    """Return the HLO text of a program, and the bytes that it must read and write."""
    # JAX 0.10.2 checks the compute capability of the attached GPU. No GPU is attached here.
    check = mock.patch("jax._src.cudnn.fused_attention_stablehlo.check_compute_capability", lambda capability: True)
    with check, jax.default_device(target := device()):
        traced, unused = program.trace(target)
        compiled = traced.lower().compile()
    memory: Any = compiled.memory_analysis()
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes - unused
    return compiled.as_text(), needed


def strategy() -> nnxmoe.Strategy:
    """Return the defaults on an H100."""
    auto = nnxmoe.Strategy.auto("gpu")
    attention_fn: Any = auto.attention_fn
    return dataclasses.replace(auto, attention_fn=dataclasses.replace(attention_fn, max_head_dim=256))


def abstract_model(preset: str, method: str | None = None) -> nnxmoe.CausalLM:
    """Return a model without arrays."""
    config: Any = dataclasses.replace(PRESETS[preset], **LAYERS[preset])
    model = model_class(config)(config, strategy(), rngs=None, dtype=jnp.bfloat16)
    quantize_structure(model, None if method is None else parse_method(method), jnp.bfloat16)
    return model


def on(target: Any, tree: Any) -> Any:
    """Place abstract arrays on a device."""
    place = SingleDeviceSharding(target)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)


def _traced(target: Any, run: Any, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    return jax.jit(run, donate_argnums=donate).trace(*on(target, arguments))


def _unread(model: nnxmoe.CausalLM, tokens: int) -> int:
    """Bytes of the embedding rows that are not looked up."""
    table = model.embed.table
    rows = 0 if model.head is None else max(table.shape[0] - tokens, 0)
    return rows * table.shape[1] * table.dtype.itemsize


def model_program(preset: str, rows: int, tokens: int, packed: bool = False) -> Program:
    """The program of ``model(tokens)``, with the mask that the call adds; or of packed rows."""

    def trace(target: Any) -> tuple[Any, int]:
        model = abstract_model(preset)
        graph, state = nnx.split(model)
        ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
        mask_or_segments = ids if packed else jax.ShapeDtypeStruct((rows, tokens), jnp.bool_)

        def run(state: Any, ids: Any, mask_or_segments: Any) -> Any:
            masks = (None, None, mask_or_segments) if packed else (mask_or_segments, None, None)
            return nnx.merge(graph, state).forward(ids, *masks, None, None, None, False, False, False).logits

        return _traced(target, run, state, ids, mask_or_segments), _unread(model, rows * tokens)

    name = f"prefill {preset}, {'packed' if packed else 'model(tokens)'}, {rows} x {tokens}"
    return Program(name, LAYERS[preset]["num_hidden_layers"], trace)


def engine_program(
    preset: str, rows: int, tokens: int, capacity: int, first: bool = True, method: str | None = None
) -> Program:
    """A pass of ``generate`` and of the engine: the first chunk of a prompt, a later chunk, or a decoding step."""
    mode, decodes = passes.LogitsMode(last_only=tokens > 1), tokens == 1

    def trace(target: Any) -> tuple[Any, int]:
        model = abstract_model(preset, method)
        graph, state = nnx.split(model)
        ids, valid = (jax.ShapeDtypeStruct((rows, tokens), dtype) for dtype in (jnp.int32, jnp.bool_))
        size = passes.CacheSize(capacity, 0)
        cache = None if first else jax.eval_shape(lambda: model.empty_cache(rows, *size))

        def run(state: Any, ids: Any, valid: Any, cache: Any) -> Any:
            mask = None if decodes and rows == 1 else valid
            return passes._pass(nnx.merge(graph, state), ids, mask, cache, jnp.int32(0), size, mode)

        return _traced(target, run, state, ids, valid, cache, donate=(3,)), _unread(model, rows * tokens)

    quantized = f" {method}" if method else ""
    name = f"decode {preset}{quantized}, {rows} rows, cache of {capacity}"
    if not decodes:
        name = f"prefill {preset}, engine, {rows} x {tokens}, {'empty cache' if first else f'cache of {capacity}'}"
    return Program(name, LAYERS[preset]["num_hidden_layers"], trace)


def moe_program(name: str, tokens: int, backward: bool) -> Program:
    """The MoE layer of a model."""
    shape = MOE[name]

    def trace(target: Any) -> tuple[Any, int]:
        options: Any = {"dtype": jnp.bfloat16, "rngs": None}
        router = Router(shape.dim, shape.experts, SoftmaxTopK(shape.chosen), bias=False, **options)
        experts = Experts(shape.dim, shape.width, shape.experts, matmul=strategy().matmul, **options)
        graph, state = nnx.split(MoE(router, experts, strategy().dispatch, shared=None))
        x = jax.ShapeDtypeStruct((1, tokens, shape.dim), jnp.bfloat16)

        def forward(state: Any, x: Any) -> Any:
            return nnx.merge(graph, state)(x)[0]

        def gradients(state: Any, x: Any, dy: Any) -> Any:
            y, pull = jax.vjp(forward, state, x)
            return y, pull(dy)

        return (_traced(target, gradients, state, x, x) if backward else _traced(target, forward, state, x)), 0

    return Program(f"moe {name}, {tokens} tokens{', and backward' if backward else ''}", 1, trace)


def attention_program(tokens: int, heads: int, kv_heads: int, widths: tuple[int, int], backward: bool) -> Program:
    """Causal attention of one row."""

    def trace(target: Any) -> tuple[Any, int]:
        shapes = (heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1])
        arrays = [jax.ShapeDtypeStruct((1, count, tokens, width), jnp.bfloat16) for count, width in shapes]
        dy = jax.ShapeDtypeStruct((1, heads, tokens, widths[1]), jnp.bfloat16)
        attention_fn = strategy().attention_fn

        def forward(q: Any, k: Any, v: Any) -> Any:
            index = jnp.arange(tokens, dtype=jnp.int32)
            mask = Mask(index, None, SlotMetadata(index, None, None), None, causal=True)
            return attention_fn(q, k, v, MaskedSoftmax(mask, widths[0] ** -0.5))

        def gradients(dy: Any, *arrays: Any) -> Any:
            y, pull = jax.vjp(forward, *arrays)
            return y, pull(dy)

        return (_traced(target, gradients, dy, *arrays) if backward else _traced(target, forward, *arrays)), 0

    name = f"attention {heads} heads, {kv_heads} key heads, widths {widths}, {tokens} tokens"
    return Program(f"{name}{', and backward' if backward else ''}", 1, trace)


def lora_program(preset: str, rows: int, tokens: int, method: str | None) -> Program:
    """A training step of adapters of rank 16."""

    def trace(target: Any) -> tuple[Any, int]:
        model = abstract_model(preset, method)
        add(model, 16, rngs=None)
        with mock.patch.object(jax, "devices", lambda *_: [target]):
            step = nnxmoe.train.Step(model, optax.adamw(1e-4), trainable=nnx.LoRAParam)
            batch = {"tokens": jax.ShapeDtypeStruct((rows, tokens), jnp.int32)}
            return step.jitted.trace(*on(target, (step.shapes(), batch))), _unread(model, rows * tokens)

    return Program(f"train {preset}, {'QLoRA ' + method if method else 'LoRA'}, {rows} x {tokens}", 2, trace)


LENGTHS = ((1, 512), (1, 2048), (1, 8192), (16, 2048))
DECODED = (
    ("llama-3.1-8b", (None,)), ("mixtral-8x7b", (None, "int8", "int4")), ("qwen3-30b-a3b", (None,)),
    ("qwen3.5-35b-a3b", (None,)), ("deepseek-v2-lite", (None,)),
)  # fmt: skip
PROGRAMS = [
    *(model_program("llama-3.1-8b", *size) for size in LENGTHS),
    engine_program("llama-3.1-8b", 1, 512, 1024),
    engine_program("llama-3.1-8b", 16, 512, 1024),
    engine_program("llama-3.1-8b", 1, 512, 2048, first=False),
    engine_program("llama-3.1-8b", 1, 512, 8192, first=False),
    engine_program("llama-3.1-8b", 16, 512, 2048, first=False),
    model_program("llama-3.1-8b", 1, 2048, packed=True),
    model_program("gemma-3-4b", 1, 2048),
    engine_program("gemma-3-4b", 1, 512, 1024),
    model_program("gpt-oss-20b", 1, 2048),
    engine_program("gpt-oss-20b", 1, 512, 1024),
    *(engine_program(p, rows, 1, 1024, False, m) for p, methods in DECODED for m in methods for rows in (1, 8, 64)),
    *(moe_program(name, 4096, backward) for name in MOE for backward in (False, True)),
    *(
        attention_program(4096, *heads, backward)
        for heads in ((32, 8, (128, 128)), (128, 128, (192, 128)))
        for backward in (False, True)
    ),
    lora_program("llama-3.1-8b", 1, 2048, None),
    lora_program("llama-3.1-8b", 1, 2048, "int4"),
]
