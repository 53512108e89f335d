"""Forward passes, decode steps and training steps compile for TPUs and GPUs that are not there, with the kernels that
``Strategy.auto`` chooses for them. What is compiled fits into the device's memory; nothing is run."""

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe.apps.planning import child
from nnxmoe.apps.planning.compilation import CompileJob, environment
from nnxmoe.apps.planning.plan import default_strategy
from nnxmoe.apps.planning.work import Work
from nnxmoe.layers.attention.softmax_attention import MaskedSoftmax
from nnxmoe.layers.cache import SlotMetadata
from nnxmoe.layers.mask import Mask
from nnxmoe.mesh import make_mesh
from nnxmoe.models import PRESETS, config_from_hf, model_class
from nnxmoe.runtime.hardware import TABLE
from nnxmoe.sharding import batch_axes
from tests.benchmarks import gpu_programs
from tests.benchmarks.compiled import Facts, facts
from tests.support.families import FAMILIES
from tests.support.tiny import TINY

pytestmark = pytest.mark.accelerators

DEVICES = {"tpu": "v5p:2x2x1", "gpu": "h100"}
MEMORY = {"tpu": TABLE["tpu-v5p"].memory, "gpu": TABLE["h100"].memory}
STEPS = ("forward", "decode", "train")
KERNELS = {"tpu": "tpu_custom_call", "gpu": "triton"}  # splash attention and the Triton kernel
ONE_LAYER: dict[str, dict[str, Any]] = {  # presets cut to one layer of each kind
    "llama-3.1-8b": {"num_hidden_layers": 1},
    "mixtral-8x7b": {"num_hidden_layers": 1},
    "deepseek-v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 64},
    "gpt-oss-20b": {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")},
    "qwen3-30b-a3b": {"num_hidden_layers": 1},
}
NEWER: dict[str, dict[str, Any]] = {  # recurrent, sparse and compressed attention; layers of two widths
    "qwen3-next-80b-a3b": {"num_hidden_layers": 4, "num_experts": 64},
    "kimi-linear-48b-a3b": {"num_hidden_layers": 4, "layer_types": None, "n_routed_experts": 64},
    "deepseek-v3.2": {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 64},
    "deepseek-v4-flash": {
        "num_hidden_layers": 3, "compress_ratios": (0, 4, 128), "num_hash_layers": 1, "n_routed_experts": 64,
    },
    "gemma-4-26b-a4b": {"num_hidden_layers": 2},
    "nemotron-3-nano-30b-a3b": {
        "num_hidden_layers": 3, "layer_types": ("linear_attention", "moe", "full_attention"), "n_routed_experts": 64,
    },
    "lfm2-8b-a1b": {
        "num_hidden_layers": 3, "layer_types": ("conv", "full_attention", "conv"), "num_dense_layers": 1,
    },
}  # fmt: skip
QUICK_ON_TPU = {("mixtral-8x7b", "forward"), ("mixtral-8x7b", "train"), *((preset, "decode") for preset in ONE_LAYER)}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes on one device while the program runs, and what it calls."""

    total: int
    calls: frozenset[str]
    ragged: bool  # rows travel by the native ragged all-to-all


def compiled(platform: str, config: Any, axes: dict[str, int], work: Work, step: str) -> Compiled:
    """The program of a step. ``axes`` empty: for one device."""
    sizes: dict[str, Any] = {"fsdp": 1, "expert": 1} | axes
    strategy = default_strategy(config, sizes, platform, work)
    strategy = dataclasses.replace(strategy, pipeline=work.pipeline)
    job = CompileJob(config, strategy, sizes, work, platform, DEVICES[platform])
    found = child.devices(dataclasses.replace(job, mesh={"fsdp": 4}))
    mesh = make_mesh(**sizes, devices=found if axes else found[:1])
    made = _forward(job, mesh) if step == "forward" else child.traced(job, mesh)
    with jax.default_device(mesh.devices.flat[0]):
        program = made.lower().compile()
    memory, text = program.memory_analysis(), program.as_text()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    calls = re.findall(r'custom_call_target="([^"]+)"', text)
    return Compiled(total - memory.alias_size_in_bytes, frozenset(calls), "ragged-all-to-all" in text)


def _forward(job: CompileJob, mesh: Any) -> Any:
    strategy = dataclasses.replace(job.strategy, mesh=mesh)
    model = model_class(job.config)(job.config, strategy, rngs=None, dtype=jnp.bfloat16)
    graph, state = child.placed(model)
    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh) or None))
    tokens = jax.ShapeDtypeStruct((job.work.batch, job.work.seq), jnp.int32, sharding=rows)
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens).logits)
    with jax.default_device(mesh.devices.flat[0]):
        return run.trace(state, tokens)


def lowered_ahead_of_time() -> str:
    """Lower a step for devices that are not attached. One of these devices is the default device."""
    devices = child.devices(
        CompileJob(PRESETS["mixtral-8x7b"], nnxmoe.Strategy(), {}, Work(4, 128), "tpu", "v5p:2x2x1")
    )
    strategy = dataclasses.replace(nnxmoe.Strategy.auto("tpu"), mesh=make_mesh(fsdp=4, devices=devices))
    with jax.default_device(devices[0]):
        model = nnxmoe.models.Llama(config_from_hf(TINY["llama"] | {"vocab_size": 64}), strategy, rngs=None)
        step = nnxmoe.train.Step(model, optax.sgd(0.1))
        return step.lower({"tokens": jax.ShapeDtypeStruct((4, 128), jnp.int32)}).as_text()


def test_steps_are_lowered_for_devices_that_are_not_attached(compile_for: Callable[..., Any]) -> None:
    assert "num_partitions = 4" in compile_for("tpu", run=lowered_ahead_of_time)


@pytest.fixture(scope="session")
def compile_for() -> Iterator[Callable[..., Any]]:
    """``compile_for(platform, …)`` is `compiled`, or ``run``, in the platform's process; skipped without compiler."""
    pools: dict[str, concurrent.futures.ProcessPoolExecutor] = {}
    needed = {"tpu": ("libtpu", "tokamax"), "gpu": ("jax_cuda12_plugin", "nvidia.cudnn", "tokamax")}

    def call(platform: str, *rest: Any, run: Callable[..., Any] | None = None) -> Any:
        if missing := [name for name in needed[platform] if not _installed(name)]:
            pytest.skip(f"{missing[0]} is not installed: pip install -e '.[kernels,plan-gpu,plan-tpu]'")
        if platform not in pools:
            usual = dict(os.environ)
            os.environ.update(environment(platform, 1))
            os.environ.pop("JAX_DEFAULT_MATMUL_PRECISION")  # Mosaic refuses float32 products of bfloat16
            pools[platform] = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
            pools[platform].submit(int).result(timeout=1200)  # the process has read its environment
            os.environ.clear()
            os.environ.update(usual)
        given = (compiled, platform) if run is None else (run,)
        return pools[platform].submit(*given, *rest).result(timeout=900)

    yield call
    for pool in pools.values():
        pool.shutdown(wait=False, cancel_futures=True)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize("kind", [*TINY, *sorted({*FAMILIES} - {*TINY})])
def test_tiny_models_compile(compile_for: Callable[..., Compiled], platform: str, kind: str) -> None:
    """On one device, with 128 tokens, so that kernels take them."""
    fields = TINY.get(kind) or FAMILIES[kind].frozen
    if kind == "glm_moe_dsa":  # XLA's compiler for GPUs fails where it merges so narrow columns (jax 0.10.2)
        fields = fields | {"qk_rope_head_dim": 8}
    config = dataclasses.replace(config_from_hf(fields), max_position_embeddings=512)
    for step in STEPS:
        made = compile_for(platform, config, {}, Work(2, 128, train=step == "train"), step)
        assert 0 < made.total < 1e9
        if platform == "tpu" and step != "decode":
            assert "tpu_custom_call" in made.calls


@pytest.mark.parametrize(
    ("platform", "preset", "step"),
    [
        # libtpu compiles a training step in one to three minutes
        *(
            pytest.param(*each, marks=[pytest.mark.slow] * (each[0] == "tpu" and each[1:] not in QUICK_ON_TPU))
            for each in itertools.product(DEVICES, ONE_LAYER, STEPS)
        ),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in itertools.product(DEVICES, NEWER, STEPS)),
    ],
)
def test_layers_of_real_width_compile_and_fit(
    compile_for: Callable[..., Compiled], platform: str, preset: str, step: str
) -> None:
    """On four devices, experts over two of them: rows travel by the native exchange, and products are kernels."""
    config: Any = dataclasses.replace(PRESETS[preset], **(ONE_LAYER | NEWER)[preset])
    made = compile_for(platform, config, {"fsdp": 2, "expert": 2}, Work(4, 1024, train=step == "train"), step)
    assert made.total < MEMORY[platform]
    assert made.ragged == bool(config.experts)
    if config.experts and step != "decode":
        assert any(KERNELS[platform] in call for call in made.calls)


@pytest.mark.parametrize("platform", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_stages_compile_with_kernels(compile_for: Callable[..., Any], platform: str) -> None:
    """Kernels are manual over all axes of the mesh where the stages are over one."""
    config = dataclasses.replace(PRESETS["mixtral-8x7b"], num_hidden_layers=2)
    work = Work(4, 1024, microbatches=2)
    made = compile_for(platform, config, {"pipe": 2, "expert": 2}, work, "train")
    assert made.total < MEMORY[platform] and any(KERNELS[platform] in call for call in made.calls)


def distances(topology: str, slices: int, axes: dict[str, int], across: str | None) -> dict[str, set[int]]:
    """Mesh axis -> how far apart neighbours along it are: steps on the torus, -1 for another slice."""
    from jax.experimental import topologies

    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices).devices
    sizes: dict[str, Any] = dict(axes)
    mesh = make_mesh(**sizes, devices=found, across=across)
    torus = [max(place) + 1 for place in zip(*(one.coords for one in found), strict=True)]

    def apart(one: Any, other: Any) -> int:
        if getattr(one, "slice_index", 0) != getattr(other, "slice_index", 0):
            return -1
        steps = (abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
        return sum(min(step, size - step) for step, size in zip(steps, torus, strict=True))

    gone = dict[str, set[int]]()
    for i, axis in enumerate(mesh.axis_names):
        if axes.get(axis, 1) > 1:
            lines = np.moveaxis(mesh.devices, i, 0)
            gone[axis] = {
                apart(*pair) for a, b in itertools.pairwise(lines) for pair in zip(a.flat, b.flat, strict=True)
            }
    return gone


def test_a_step_for_two_slices_compiles(compile_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed over the slices, and no rows of experts cross them."""
    compile_for("tpu", run=int)  # skips without the compiler
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION", raising=False)  # as in `compile_for`
    config = config_from_hf(TINY["mixtral"] | {"max_position_embeddings": 512})
    mesh, options = {"data": 2, "fsdp": 2, "expert": 2}, {"batch": 8, "seq": 128, "across": "data"}
    made = nnxmoe.plan(config, mesh, on="tpu-v5p:2x2x1", compile_for="device", advise=False, **options)
    assert made.exact and made.program is not None
    crossing = {one.kind for one in made.program.collectives if "data" in one.axes}
    assert crossing == {"all-reduce"}


def test_meshes_lie_on_the_torus(compile_for: Callable[..., Any]) -> None:
    """Neighbours along each axis are neighbours on the torus; only the axis that is named goes over slices."""
    axes = {"fsdp": 4, "expert": 4, "tensor": 4}
    near = {axis: {1} for axis in axes}
    assert compile_for("tpu", "v5p:4x4x4", 1, axes, None, run=distances) == near
    found = compile_for("tpu", "v5p:4x4x4", 2, {"data": 2, **axes}, "data", run=distances)
    assert found == {"data": {-1}, **near}
    with pytest.raises(ValueError, match=r"'tensor' spans 2 slices. .* a multiple of 2"):
        compile_for("tpu", "v5p:2x2x1", 2, {"fsdp": 8, "tensor": 1}, "tensor", run=distances)


def attention_calls(preset: str, kind: str) -> tuple[frozenset[str], int]:
    """Return the calls of a prefill program for a GPU, and the number of its loops."""
    made = {
        "padded": lambda: gpu_programs.model_program(preset, 1, 1024),
        "packed": lambda: gpu_programs.model_program(preset, 1, 1024, packed=True),
        "empty cache": lambda: gpu_programs.engine_program(preset, 1, 512, 1024),
        "cache": lambda: gpu_programs.engine_program(preset, 1, 512, 1024, first=False),
    }[kind]()
    text, _ = gpu_programs.compile_program(made)
    return frozenset(re.findall(r'custom_call_target="([^"]+)"', text)), text.count(" while(")


@pytest.mark.parametrize(
    ("preset", "kind", "call"),
    [
        ("llama-3.1-8b", "padded", "fmhaSoftmax"),
        ("llama-3.1-8b", "packed", "fmhaScaleBiasSoftmax"),
        ("llama-3.1-8b", "empty cache", "fmhaSoftmax"),
        ("llama-3.1-8b", "cache", "fmhaScaleBiasSoftmax"),
        ("gemma-3-4b", "padded", "fmhaSoftmax"),
        ("gpt-oss-20b", "empty cache", "fmhaScaleBiasSoftmax"),
    ],
)
def test_prefill_uses_cudnn(compile_for: Callable[..., Any], preset: str, kind: str, call: str) -> None:
    """Prefill with padding, packed documents, a window, sinks and a cache calls cuDNN and has no loop, because a GPU
    waits for the host in each iteration."""
    calls, loops = compile_for("gpu", preset, kind, run=attention_calls)
    assert f"__cudnn${call}" in calls and not loops


def backward_calls(packed: bool) -> frozenset[str]:
    """Return the calls of a backward pass of attention: over packed documents, or with a window and sinks."""

    def loss(q: Any, k: Any, v: Any, segment: Any, sinks: Any) -> Any:
        index = jnp.arange(256, dtype=jnp.int32)
        segment, window, sinks = (segment, None, None) if packed else (None, 128, sinks)
        mask = Mask(index, segment, SlotMetadata(index, None, segment), window, causal=True)
        outputs = gpu_programs.strategy().attention_fn(q, k, v, MaskedSoftmax(mask, 0.125, sinks=sinks))
        return jnp.sum(outputs.astype(jnp.float32) ** 2)

    def trace(target: Any) -> tuple[Any, int]:
        arrays = [jax.ShapeDtypeStruct((2, heads, 256, 64), jnp.bfloat16) for heads in (4, 2, 2)]
        arrays += jax.ShapeDtypeStruct((2, 256), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.bfloat16)
        gradients = jax.grad(loss, (0, 1, 2) if packed else (0, 1, 2, 4))
        return jax.jit(gradients).trace(*gpu_programs.on(target, arrays)), 0

    text, _ = gpu_programs.compile_program(gpu_programs.Program("attention", 1, trace))
    return frozenset(re.findall(r'custom_call_target="([^"]+)"', text))


@pytest.mark.parametrize("packed", [True, False])
def test_training_uses_cudnn(compile_for: Callable[..., Any], packed: bool) -> None:
    """The backward pass over packed documents (Llama), or with a window and sinks (gpt-oss), calls cuDNN."""
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in compile_for("gpu", packed, run=backward_calls)


def adapter_step(method: str | None) -> Facts:
    return facts(*gpu_programs.compile_program(gpu_programs.lora_program("llama-3.1-8b", 1, 128, method)))


def test_an_adapter_step_copies_no_kernel(compile_for: Callable[..., Any]) -> None:
    assert not compile_for("gpu", None, run=adapter_step).copies


def test_gradients_of_quantized_products_are_bfloat16(compile_for: Callable[..., Any]) -> None:
    """Only small products, such as those of adapters, may be float32."""
    products = compile_for("gpu", "int4", run=adapter_step).products
    assert products.get("f32", (0, 0.0))[1] < 0.02 * sum(flops for _, flops in products.values())
