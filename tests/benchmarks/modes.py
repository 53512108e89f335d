"""MaxText's table of execution modes on eight devices: eight AdamW steps from its parameters, on its tokens.

    python -m tests.benchmarks.modes [--steps 20]

Prints for each mode the collectives of the compiled step, temporary bytes a device, the time of a step and the largest
difference from MaxText's eight losses; beside them MaxText's own temporary bytes on the same shapes. Of DeepSeek-V3
there is no recorded training, so that half has random parameters and no losses to compare.
"""

import argparse
import collections
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    os.environ.setdefault("TQDM_DISABLE", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import nnxmoe
from nnxmoe.convert import maxtext
from nnxmoe.models import DeepSeekV3, DeepSeekV3Config
from nnxmoe.sharding import batch_axes

CASE = Path(__file__).resolve().parents[1] / "data" / "maxtext" / "train_mixtral"
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")
RAGGED = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll())
RING = nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RingOfExperts())
# Mode -> dispatch, which axis has the eight devices, MaxText's temporary megabytes a device (Mixtral, DeepSeek-V3).
MODES: dict[str, tuple[Any, str, float, float]] = {
    "sparse ring EP8": (RING, "expert", 0.96, 0.89),
    "sparse ragged EP8": (RAGGED, "expert", 1.20, 1.04),
    "sparse FSDP8": (nnxmoe.Sorted(), "fsdp", 0.92, 2.66),
    "dense FSDP8": (nnxmoe.Dense(), "fsdp", 0.74, 0.61),
    "dense EP8": (nnxmoe.Dense(), "expert", 0.78, 0.61),
}
DEEPSEEK = DeepSeekV3Config(
    vocab_size=128, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=6,
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2,
    first_k_dense_replace=1,
)  # fmt: skip


def tokens() -> np.ndarray:
    """16 rows of 16 tokens and the one that follows."""
    return np.random.RandomState(3).randint(0, 128, (16, 17)).astype(np.int32)


def load(file: str, strategy: nnxmoe.Strategy) -> nnxmoe.CausalLM:
    """MaxText's Mixtral, from ``params_step0`` or ``params_step8``."""
    config = nnxmoe.config_from_hf(json.loads((CASE / "hf_config.json").read_text()))
    return maxtext.from_tree(load_file(CASE / f"{file}.safetensors"), config, strategy)


class Training:
    """The compiled training step of a model on its mesh, and where it stands."""

    def __init__(self, model: nnxmoe.CausalLM):
        settings = json.loads((CASE / "train.json").read_text())
        mesh = model.strategy.mesh
        assert mesh is not None
        self.graph, params, self.rest = nnx.split(model, nnx.Param, ...)
        self.optimizer = optimizer(settings)
        places = jax.tree.map(lambda a: a.sharding, params)
        moments = jax.eval_shape(self.optimizer.init, params)
        everywhere = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), moments)
        state_places = optax.tree_map_params(self.optimizer, lambda _, place: place, everywhere, places)
        self.state = params, jax.jit(self.optimizer.init, out_shardings=state_places)(params)
        rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        self.batch = jax.device_put((tokens()[:, :-1], tokens()[:, 1:]), rows)
        step = jax.jit(self.step, donate_argnums=0, out_shardings=((places, state_places), None))
        self.program = step.lower(self.state, self.rest, self.batch).compile()

    def step(self, state: Any, rest: Any, batch: Any) -> Any:
        """One step of AdamW on the mean cross-entropy, returned with it."""

        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(self.graph, params, rest)(batch[0]).logits
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

        params, moments = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = self.optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Losses and seconds of the next steps."""
        losses, seconds = [], []
        for _ in range(steps):
            started = time.perf_counter()
            self.state, value = self.program(self.state, self.rest, self.batch)
            losses.append(float(value))
            seconds.append(time.perf_counter() - started)
        return losses, seconds

    @property
    def temporary(self) -> float:
        """Megabytes a device."""
        return self.program.memory_analysis().temp_size_in_bytes / 1e6

    @property
    def collectives(self) -> collections.Counter[str]:
        """How many of each kind the compiled step has; one in a loop counts once."""
        return collections.Counter(re.findall(rf" ({'|'.join(KINDS)})(?:-start)?\(", self.program.as_text()))


def optimizer(settings: dict[str, Any]) -> optax.GradientTransformation:
    """MaxText's AdamW with its learning rates."""
    rates, values = jnp.asarray(settings["learning_rates"]), settings["optimizer"]
    adam = optax.adamw(
        lambda step: rates[step],
        values["adam_b1"],
        values["adam_b2"],
        values["adam_eps"],
        weight_decay=values["adam_weight_decay"],
    )
    return optax.chain(optax.clip_by_global_norm(values["gradient_clipping_threshold"]), adam)


def strategy(mode: str) -> nnxmoe.Strategy:
    """Scanned layers whose activations are computed again in the backward pass, on a mesh of eight."""
    dispatch, axis, *_ = MODES[mode]
    mesh = nnxmoe.make_mesh(**{axis: 8})
    return nnxmoe.Strategy(dispatch=dispatch, stacking=nnxmoe.Scanned(), remat=nnxmoe.Remat(), mesh=mesh)


def mixtral(mode: str) -> Training:
    """From MaxText's parameters at step 0."""
    return Training(load("params_step0", strategy(mode)))


def deepseek(mode: str) -> Training:
    """Random parameters of the shapes that MaxText's table has."""
    return Training(DeepSeekV3(DEEPSEEK, strategy(mode), rngs=nnx.Rngs(0)))


def main() -> int:
    """Prints a table a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="timed steps a mode (default 20)")
    timed = parser.parse_args().steps
    wanted = json.loads((CASE / "train.json").read_text())["losses"]
    for name, make, column in (("Mixtral", mixtral, 0), ("DeepSeek-V3", deepseek, 1)):
        print(f"\n| {name} | {' / '.join(KINDS)} | temp MB (MaxText) | step ms | loss, 8 steps | from MaxText's |")
        print("|---|---|---|---|---|---|")
        for mode, (_, _, *megabytes) in MODES.items():
            training = make(mode)
            losses, _ = training.run(len(wanted))
            _, seconds = training.run(timed)
            error = f"{max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}" if column == 0 else ""
            counts = " / ".join(str(training.collectives[kind]) for kind in KINDS)
            temp, time_ = f"{training.temporary:.2f} ({megabytes[column]:.2f})", 1e3 * statistics.median(seconds)
            ends = f"{losses[0]:.6f} … {losses[-1]:.6f} (perplexity {np.exp(losses[-1]):.4f})"
            print(f"| {mode} | {counts} | {temp} | {time_:.0f} | {ends} | {error} |", flush=True)
    print(f"\nMaxText's losses: {' '.join(f'{loss:.6f}' for loss in wanted)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
