"""One of several processes: ``python -m tests.support.worker OUT TASK`` in the environment of `nnxmoe.runtime.launch`.

``numbers`` writes the results that `test_processes` compares to OUT. The other tasks fail, each in its own way.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import nnxmoe
from nnxmoe import ExpertParallel, RaggedAllToAll, RingOfExperts, Sorted, train
from nnxmoe.convert import maxtext
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.maxtext import orbax_folder
from nnxmoe.convert.storage import write_safetensors
from nnxmoe.runtime.interrupts import Interrupted
from nnxmoe.runtime.processes import initialize
from nnxmoe.sharding_rules import sharding_of
from nnxmoe.train.checkpoints import Checkpoints
from nnxmoe.train.loop.feed import put_batch
from tests.support.cases import HF_CASES

DEVICES = 4
PLANS: dict[str, tuple[str, Any, dict[str, int]]] = {
    "mixtral fsdp sorted": ("mixtral_basic", Sorted(), {"fsdp": DEVICES}),
    "mixtral expert ragged": ("mixtral_basic", ExpertParallel(Sorted(), RaggedAllToAll()), {"expert": DEVICES}),
    "deepseek fsdp expert ring": (
        "deepseek_yarn",
        ExpertParallel(Sorted(), RingOfExperts()),
        {"fsdp": 2, "expert": DEVICES // 2},
    ),
}
# Arguments of `initialize` per task: short heartbeats, or short timeouts at the start or end.
INITIALIZE: dict[str, dict[str, Any]] = {
    "step": {"timeout": 90, "heartbeat_timeout_seconds": 4},
    "stop": {"timeout": 90, "heartbeat_timeout_seconds": 4},
    "fail": {"timeout": 90, "heartbeat_timeout_seconds": 4, "shutdown_timeout_seconds": 4},
    "end": {"timeout": 10},
    "missing": {"timeout": 3},
}
# Meshes with an axis that crosses two processes, which is named first.
SHARED = {"tensor": {"fsdp": 2, "tensor": 2}, "context": {"context": DEVICES},
          "context in rows": {"fsdp": 2, "context": 2}, "fsdp": {"fsdp": 2, "context": 2}}  # fmt: skip
Numbers = dict[str, np.ndarray]


def load(plan: str) -> nnxmoe.CausalLM:
    case, dispatch, sizes = PLANS[plan]
    mesh = nnxmoe.make_mesh(**sizes, devices=jax.devices()[:DEVICES])
    strategy = nnxmoe.Strategy(dispatch=dispatch, stacking=nnxmoe.Scanned())
    return nnxmoe.from_pretrained(HF_CASES / case / "model", mesh=mesh, strategy=strategy)


def numbers(plan: str) -> Numbers:
    """Logits, routing, loss and gradients, the loss after a step, new ids and the bytes read, with four devices."""
    case, _, sizes = PLANS[plan]
    model = load(plan)
    mesh = model.strategy.mesh
    tokens = np.random.default_rng(0).integers(0, 256, (DEVICES, 6)).astype(np.int32)
    out = model(tokens, return_routing=True)
    assert out.routing is not None
    found = {"logits": out.logits}
    found |= {f"experts {i}": routing.experts for i, routing in out.routing.items()}
    found |= train_step(model, tokens, mesh)
    host = jax.tree.map(np.asarray, jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(found))
    if "expert" in sizes:
        host["ids"] = nnxmoe.generate(model, tokens[:3], max_new_tokens=4, eos_token_id=None)
        tokenizer = nnxmoe.Tokenizer.from_pretrained(HF_CASES / case / "model")
        pieces = nnxmoe.stream(model, tokenizer, tokens[0].tolist(), max_new_tokens=4, eos_token_id=None)
        host["text"] = np.frombuffer("".join(pieces).encode(), np.uint8)
    leaves = jax.tree.leaves(nnx.state(model))
    held = [{str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards} for leaf in leaves]
    host["bytes held"] = np.asarray(sum(sum(parts.values()) for parts in held))
    host["bytes read"] = np.asarray(model.load_report.bytes_read)
    return host


def train_step(model: nnxmoe.CausalLM, tokens: np.ndarray, mesh: Any) -> dict[str, jax.Array]:
    """Loss and gradients of next-token prediction, and the loss after one step of gradient descent."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    where = jax.tree.map(
        lambda v: v.replace(sharding_of(v, mesh)), params, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )

    def loss(params: Any) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(jnp.asarray(tokens)).logits
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(tokens)[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    def step(params: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        return value, grads, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    run = jax.jit(step, out_shardings=(None, where, where))
    before, grads, params = run(params)
    after, *_ = run(params)
    named = {f"gradient {'.'.join(map(str, path))}": v.get_value() for path, v in nnx.to_flat_state(grads)}
    return {"loss before": before, "loss after": after, **named}


def shares(out: Path) -> None:
    """Losses of two steps, each process passing its share of the rows, on meshes whose axes cross processes."""
    rows = np.random.default_rng(0).integers(0, 256, (DEVICES, 8)).astype(np.int32)
    mine = rows.reshape(jax.process_count(), -1, 8)[jax.process_index()]
    for name, sizes in SHARED.items():
        mesh = nnxmoe.make_mesh(**sizes, devices=jax.devices()[:DEVICES], across=name.split()[0])
        model = nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model", mesh=mesh)
        step = train.Step(model, optax.sgd(0.1))
        state, losses = step.init(), []
        for _ in range(2):
            state, report = step(state, put_batch({"tokens": mine}, step))
            losses.append(float(report.losses.total))
        pairs = {"tokens": np.stack([mine, mine[:, ::-1]], 1), "loss_mask": np.ones((len(mine), 2, 8), np.int32)}
        (batch,) = train.with_reference([pairs], model)
        np.savez(out / f"{name} {jax.process_index()}", losses=losses, reference=batch["reference_logps"])


def rollouts(out: Path) -> None:
    """Metrics of GRPO on meshes that cross processes, with rewards that differ per process."""

    def reward(completions: Any) -> list[float]:
        return [float(len(set(ids))) + jax.process_index() for ids in completions]

    for name in ("fsdp", "context"):
        mesh = nnxmoe.make_mesh(**SHARED[name], devices=jax.devices()[:DEVICES], across=name)
        model = nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model", mesh=mesh)
        grpo = train.GRPO(reward, group_size=3, max_new_tokens=6, seq_len=16, eos_token_id=None, minibatches=3)

        def run(*ids: int) -> list[dict[str, float]]:
            prompts = [[{"prompt": [5, 6, i]} for i in ids]]
            return train.fit(model, prompts, objective=grpo, optimizer=optax.sgd(0.1), steps=6).history  # noqa: B023

        found = [[m[k] for k in ("loss", "reward", "samples", "entropy", "gradient_norm")] for m in run(7, 8, 9)]
        np.savez(out / f"{name} {jax.process_index()}", found=found)
    if jax.process_count() > 1:
        try:
            run(7 + jax.process_index())
        except ValueError as error:
            assert "different prompts" in str(error), error
        else:
            raise AssertionError("the processes sampled answers to different prompts")


class OwnRows:
    """Rows that differ by process, as the state of their iterator does."""

    def __init__(self) -> None:
        self.at = 1000 * jax.process_index()

    def __iter__(self) -> "OwnRows":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        self.at += 1
        return {"tokens": np.random.default_rng(self.at).integers(0, 256, (2, 8)).astype(np.int32)}

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stopped(out: Path) -> None:
    """Trainings that process 1 interrupts, and that its callback ends; without a mesh a training is refused."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    mesh = nnxmoe.make_mesh(fsdp=-1)
    model = nnxmoe.from_pretrained(HF_CASES / "mixtral_basic" / "model", mesh=mesh)
    second = jax.process_index() == 1

    def run(steps: int = 6, at_two: Callable[[], Any] = lambda: None, late: bool = True, **more: Any) -> list[float]:
        def callback(progress: train.Progress) -> Any:
            return at_two() if second and progress.step == 2 else None

        setattr(callback, "late", late)  # noqa: B010
        optimizer = optax.sgd(0.1)
        fitted = train.fit(model, OwnRows(), optimizer=optimizer, steps=steps, callbacks=[callback], **more)
        return [metrics["loss"] for metrics in fitted.history]

    wanted, kept = run(), train.Checkpoints(out / "run", every=100)
    try:
        run(at_two=lambda: os.kill(os.getpid(), signal.SIGINT), checkpoint=kept)
    except Interrupted as error:
        first = [metrics["loss"] for metrics in error.fitted.history]
    else:
        raise AssertionError("it was not interrupted")
    resumed = first + run(checkpoint=kept)
    ended = run(at_two=lambda: True, late=False)
    np.savez(out / f"stopped {jax.process_index()}", wanted=wanted, resumed=resumed, first=first, ended=ended)
    model.strategy = nnxmoe.Strategy()
    try:
        run()
    except ValueError as error:
        assert "mesh=None in a job of 2 processes" in str(error), error
    else:
        raise AssertionError("each process would train a separate model")


def stacked(out: Path) -> None:
    """Saves a model whose tensors hold all experts of a layer, and gate and up alternating."""
    for name, sizes in {"pipe": {"pipe": 2}, "expert": {"expert": 2}}.items():
        strategy = nnxmoe.Strategy(stacking=nnxmoe.Scanned(), pipeline=nnxmoe.Pipeline(2) if name == "pipe" else None)
        model = nnxmoe.from_pretrained(out / "base", mesh=nnxmoe.make_mesh(**sizes), strategy=strategy)
        nnxmoe.save_pretrained(model, out / name)


def saved(plan: str, out: Path) -> None:
    """Saves a model sharded over processes in every format; existing folders are refused."""
    model = load(plan)
    nnxmoe.save_pretrained(model, out / f"{plan} hf")
    maxtext.save(model, out / f"{plan} maxtext")
    nnxmoe.save(model, out / f"{plan} native")
    for save in (nnxmoe.save_pretrained, maxtext.save, nnxmoe.save):
        try:
            save(model, out / f"{plan} hf")
        except CheckpointError as error:
            assert "is not an empty folder" in str(error)
        else:
            raise AssertionError("it was written over")


def cannot_save(out: Path) -> None:
    """Process 1's disk is full: both processes raise and no file remains."""
    model, message = load("mixtral fsdp sorted"), "could not write its shards"
    if jax.process_index() == 1:
        message = "No space left on device"
        write_safetensors._write_file = full_disk
        orbax_folder._SpreadWriter.__mro__[2].serialize = full_disk  # pyright: ignore
    for name, save in (("hf", nnxmoe.save_pretrained), ("maxtext", maxtext.save), ("native", nnxmoe.save)):
        try:
            save(model, out / f"never {name}")
        except (CheckpointError, OSError) as error:
            assert message in str(error), error
            (out / f"{name} failed {jax.process_index()}").write_text(str(error))
        else:
            raise AssertionError("it was saved")


def full_disk(*_: Any, **__: Any) -> Any:
    raise CheckpointError("cannot write: No space left on device")


def checkpoints(out: Path) -> None:
    """Saves arrays sharded over processes and restores them on another mesh; every process raises each error."""
    rows = NamedSharding(nnxmoe.make_mesh(fsdp=-1), PartitionSpec("fsdp"))
    others = NamedSharding(nnxmoe.make_mesh(fsdp=2, tensor=2), PartitionSpec("fsdp", "tensor"))
    everywhere = NamedSharding(rows.mesh, PartitionSpec())
    host = np.arange(48, dtype=np.float32).reshape(8, 6)
    key = jax.jit(lambda: jax.random.key(7), out_shardings=everywhere)()

    def arrays(step: int) -> dict[str, jax.Array]:
        return {"a": jax.make_array_from_callback(host.shape, rows, lambda at: host[at] + step), "k": key}

    with Checkpoints(out / "run", keep=2, every=1) as kept:
        assert kept.latest() is None
        for step in range(1, 5):
            assert kept.save(step, arrays(step), {"at": step})
        kept.wait()
        assert kept.latest() == 4
        try:
            kept.save(5, {"a": jnp.ones((8, 6)), "k": key})
        except CheckpointError as error:
            assert "host local" in str(error), error
        else:
            raise AssertionError("it was saved")
    like = {"a": jax.ShapeDtypeStruct(host.shape, jnp.float32, sharding=others), "k": key}
    found, extra = kept.restore(3, like)
    assert extra == {"at": 3} and found["a"].sharding == others
    for shard in found["a"].addressable_shards:
        np.testing.assert_array_equal(shard.data, host[shard.index] + 3)
    refused(out)


def refused(out: Path) -> None:
    """An error in the first process is raised in every process."""
    (out / "foreign").mkdir(exist_ok=True)
    (out / "foreign" / "mine").touch()
    one = jax.jit(lambda: jnp.ones(4), out_shardings=NamedSharding(nnxmoe.make_mesh(fsdp=-1), PartitionSpec()))()
    try:
        Checkpoints(out / "foreign", every=1).save(1, {"a": one})
    except CheckpointError as error:
        assert "holds mine" in str(error), error
    else:
        raise AssertionError("it was saved")


# Failures


def summed() -> Callable[[], float]:
    """A compiled sum over all devices of all processes: a collective that blocks until every process joins."""
    mesh = nnxmoe.make_mesh(data=-1)
    ones = jax.make_array_from_callback(
        (jax.device_count(),), NamedSharding(mesh, PartitionSpec("data")), lambda at: np.ones(1, np.float32)
    )
    run = jax.jit(jnp.sum)
    return lambda: float(run(ones))


def steps(out: Path, at_ten: Callable[[], object] = lambda: None) -> None:
    """Runs steps until killed; at the tenth writes a file, and process 1 calls ``at_ten``."""
    step = summed()
    for i in range(1_000_000):
        if i == 10:
            (out / f"ten {jax.process_index()}").touch()
            if jax.process_index() == 1:
                at_ten()
        assert step() == jax.device_count()


def fail() -> None:
    raise ArithmeticError("the loss is not finite")


def main(out: Path, task: str, *plans: str) -> None:
    initialize(**INITIALIZE.get(task, {"timeout": 90}))
    match task:
        case "numbers":
            for plan in plans:
                np.savez(out / f"{plan} {jax.process_index()}", **numbers(plan))
                if jax.process_count() > 1:
                    saved(plan, out)
        case "shares":
            shares(out)
        case "rollouts":
            rollouts(out)
        case "checkpoint":
            checkpoints(out)
        case "one stops":
            stacked(out)
            stopped(out)
        case "cannot save":
            cannot_save(out)
        case "step":
            steps(out)
        case "stop":
            steps(out, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        case "fail":
            steps(out, fail)
        case "end":
            summed()()
            (out / f"ten {jax.process_index()}").touch()
            time.sleep(1000 if jax.process_index() == 1 else 0)
        case _:
            raise ValueError(task)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
