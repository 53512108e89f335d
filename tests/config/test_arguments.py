"""Arguments of the wrong type raise ValueErrors that name the argument, in every public function."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import models, train
from nnxmoe.apps.planning.search import search
from nnxmoe.apps.planning.torus import hardware
from nnxmoe.apps.planning.work import Work
from nnxmoe.config.arguments import CheckedFields
from nnxmoe.convert import maxtext
from nnxmoe.layers.linear.lora import LoRA
from nnxmoe.layers.linear.quantized_products import BlockwiseProduct, TwoInt8Product, W8A8Product
from nnxmoe.model.quantization.methods import Mixed
from nnxmoe.moe.triton import TritonMatmul, TritonProduct
from nnxmoe.train import lora
from nnxmoe.train.finetune import Finetune
from nnxmoe.train.loop.callbacks import CsvLog, JsonLog
from nnxmoe.train.loop.rollouts import RolloutOptions

pytestmark = pytest.mark.wrong_types

ODD: tuple[Any, ...] = (True, 0, -1, 1.5, 10**30, "", "a/b\0", b"x", [], ["x"], {}, {"a": 1}, object(), int)
ODD += (float("nan"), np.int64(3), lambda: 3)
SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = models.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
SGD = optax.sgd(0.1)


@pytest.fixture(scope="module")
def model() -> nnxmoe.CausalLM:
    return models.Mixtral(CONFIG, rngs=nnx.Rngs(0))


def calls(model: Any, folder: Path) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield names of arguments, each with a function that passes a value for it."""
    new = folder / "new"
    yield "path_or_hub_id", lambda value: nnxmoe.from_pretrained(value, local_files_only=True)
    yield "path_or_hub_id", lambda value: nnxmoe.Tokenizer.from_pretrained(value, local_files_only=True)
    for name in ("dtype", "mesh", "strategy", "quantize"):
        yield name, lambda value, name=name: nnxmoe.from_pretrained("demo", **{name: value})
    yield "folder", lambda value: nnxmoe.save_pretrained(model, value)
    yield "folder", lambda value: nnxmoe.save(model, value)
    yield "folder", lambda value: maxtext.save(model, value)
    yield "folder", lambda value: nnxmoe.load(value)
    yield "folder", lambda value: maxtext.load(value)
    for save in (nnxmoe.save_pretrained, nnxmoe.save, maxtext.save):
        yield "model", lambda value, save=save: save(value, new)
    yield "dtype", lambda value: nnxmoe.save_pretrained(model, new, dtype=value)
    yield "max_shard_size", lambda value: nnxmoe.save_pretrained(model, new, value)
    for name in ("mesh", "strategy"):
        yield name, lambda value, name=name: maxtext.from_tree({"params": {}}, CONFIG, **{name: value})
    yield "config", lambda value: maxtext.from_tree({"params": {}}, value)
    for field in dataclasses.fields(nnxmoe.Strategy):
        yield field.name, lambda value, name=field.name: nnxmoe.Strategy(**{name: value})
        yield field.name, lambda value, name=field.name: dataclasses.replace(nnxmoe.Strategy(), **{name: value})
    for name in ("data", "fsdp", "expert", "tensor", "devices"):
        yield name, lambda value, name=name: nnxmoe.make_mesh(**{name: value})
    for name in ("experts", "others", "head"):
        yield name, lambda value, name=name: Mixed(**{"experts": None, "others": None, name: value})
    for name in ("rank", "alpha", "targets", "rngs", "dtype"):
        options: dict[str, Any] = {"rank": 2, "rngs": None}
        shapes = models.Mixtral(CONFIG, rngs=None)
        yield name, lambda value, name=name, shapes=shapes, o=options: lora.add(shapes, **o | {name: value})
    with_adapter = nnx.clone(model)
    lora.add(with_adapter, 2, rngs=nnx.Rngs(0))
    for name in ("keep", "quantize"):
        yield name, lambda value, name=name: lora.merge(nnx.clone(with_adapter), **{name: value})
    yield "folder", lambda value: lora.load(model, value)
    yield "folder", lambda value: lora.merge_from(model, value)
    yield "dtype", lambda value: nnxmoe.dequantize(model, value)
    for use in (nnxmoe.dequantize, lora.merge, lora.unmerge, lora.remove, lora.without):
        yield "model", use
    for use in (lora.load, lora.save, lora.merge_from):
        yield "model", lambda value, use=use: use(value, new)
    yield "model", lambda value: nnxmoe.quantize(value, nnxmoe.Int8())
    yield "model", lambda value: lora.add(value, 2, rngs=None)
    yield "model", lambda value: lora.split_ranks(value, 2)
    choices = {field.name for field in dataclasses.fields(Work)} | {"model", "mesh", "on", "strategy", "advise"}
    for name in sorted(choices | {"compile_for"}):
        options = {"model": CONFIG, "mesh": {"fsdp": 2}, "batch": 2, "seq": 4}
        yield name, lambda value, name=name, o=options: nnxmoe.plan(**o | {name: value})
    yield "quantize", lambda value: nnxmoe.quantize(model, value)
    yield "register", models.register
    for name in ("config", "strategy", "rngs", "dtype"):
        options = {"config": CONFIG, "rngs": None}
        yield name, lambda value, name=name, o=options: models.Mixtral(**o | {name: value})


@pytest.mark.slow
def test_odd_values_are_valid_or_raise_value_errors(
    model: nnxmoe.CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = 0
    for name, call in calls(model, tmp_path):
        for value in ODD:
            try:
                call(value)
            except ValueError:
                refused += 1
            except Exception as error:
                pytest.fail(f"{name}={value!r:.40}: {type(error).__name__}: {error}")
    assert refused > 600, "few of these values are valid"


@pytest.mark.parametrize("value", [None, 3, b"x", ["a"], "", "a\0"], ids=repr)
def test_values_that_are_not_paths_name_the_argument(model: nnxmoe.CausalLM, value: Any) -> None:
    """For example None, from an unset environment variable."""
    for load in (nnxmoe.from_pretrained, nnxmoe.Tokenizer.from_pretrained):
        with pytest.raises(ValueError, match=r"path_or_hub_id is .*: pass a path"):
            load(value)
    for use in (nnxmoe.load, maxtext.load, lambda folder: lora.load(nnx.clone(model), folder)):
        with pytest.raises(ValueError, match=r"folder is .*: pass a path"):
            use(value)
    for save in (nnxmoe.save_pretrained, nnxmoe.save, maxtext.save):
        with pytest.raises(ValueError, match=r"folder is .*: pass a path"):
            save(model, value)
    if value is not None:
        with pytest.raises(ValueError, match=r"folder is .*: pass a path"):
            nnxmoe.compile_cache(value)
    for write in (JsonLog, CsvLog):
        with pytest.raises(ValueError, match=r"path is .*: pass a path"):
            write(value)


def test_fields_of_strategy_objects_are_checked() -> None:
    """Flags, parts and names of fields, by name or by position."""
    for message, call in {
        r"TritonMatmul: interpret='no': pass True or False": lambda: TritonMatmul(interpret="no"),  # pyright: ignore
        r"SplashAttention: interpret=1: pass True or False": lambda: nnxmoe.SplashAttention(interpret=1),  # pyright: ignore
        r"TritonMatmul\(fallback=3\): pass an object such as Blocked": lambda: TritonMatmul(3),  # pyright: ignore
        r"TritonProduct\(fallback=None\): pass": lambda: TritonProduct(fallback=None),  # pyright: ignore
        r"W8A8Product\(fallback=.*\): pass an object such as Block": lambda: W8A8Product(BlockwiseProduct),
        r"TwoInt8Product\(fallback='x'\): pass": lambda: TwoInt8Product(fallback="x"),  # pyright: ignore
        r"Remat\(policy='dots'\): pass": lambda: nnxmoe.Remat(policy="dots"),  # pyright: ignore
        r"ExpertParallel: axis=3: pass": lambda: nnxmoe.ExpertParallel(nnxmoe.Sorted(), nnxmoe.RaggedAllToAll(), 3),  # pyright: ignore
        r"Capacity\(\) has no argument 'fctor'; did you mean factor": lambda: nnxmoe.Capacity(fctor=2),  # pyright: ignore
        r"TritonMatmul\(\) has no argument 'fallbak'": lambda: TritonMatmul(fallbak=None),  # pyright: ignore
        r"GRPO\(kl_estimator=None\): pass an object such as unbiased_kl$": lambda: train.GRPO(max, kl_estimator=None),  # pyright: ignore
        r"RolloutOptions: pack='no': pass": lambda: RolloutOptions(pack="no"),  # pyright: ignore
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert TritonMatmul(interpret=np.True_).interpret  # pyright: ignore[reportArgumentType]


def subclasses(kind: type) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield from (subclass, *subclasses(subclass))


def test_fields_of_all_subclasses_are_checked() -> None:
    kinds = [kind for kind in subclasses(CheckedFields) if kind.__module__.startswith("nnxmoe.")]
    assert {train.GSPO, nnxmoe.RaggedAllToAll, nnxmoe.SplashAttention} < set(kinds)
    for kind in kinds:

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Traced(kind):
            traced: bool = False

        required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        with pytest.raises(ValueError, match="Traced: traced='no': pass True or False"):
            Traced(**dict.fromkeys(required), traced="no")


def test_subclasses_of_strategy_objects_have_their_own_constructors() -> None:
    class PerExpert(nnxmoe.Capacity):
        def __init__(self, rows: int, **options: Any):
            super().__init__(factor=rows / 4, **options)

    @dataclasses.dataclass(frozen=True)
    class Seeded(nnxmoe.RaggedAllToAll):
        seed: dataclasses.InitVar[int] = 0

        def __post_init__(self, seed: int) -> None:
            assert seed == 3

    class Named(TritonMatmul):
        def __init__(self, *names: str, fallback: str = "", interpret: bool = False):
            assert names == ("a", "b") and fallback in ("", "blocked")
            super().__init__(interpret=interpret)

    assert Named("a", "b", fallback="blocked") == Named("a", "b")
    with pytest.raises(ValueError, match=r"Named: interpret='no': pass True or False"):
        Named("a", "b", interpret="no")  # pyright: ignore[reportArgumentType]
    assert PerExpert(rows=2) == copy.copy(PerExpert(2)) and PerExpert(rows=2).factor == 0.5
    assert Seeded(seed=3) == Seeded(seed=3)
    with pytest.raises(ValueError, match=r"Seeded\(\) has no argument 'sed'; did you mean seed"):
        Seeded(sed=3)  # pyright: ignore[reportCallIssue]


def test_wrong_values_are_named(model: nnxmoe.CausalLM) -> None:
    def plan(**options: Any) -> Any:
        return nnxmoe.plan(CONFIG, {"fsdp": 2}, batch=2, seq=4, **options)

    for message, call in {
        r"plan\(strategy=5\): use a Strategy": lambda: plan(strategy=5),
        r"plan\(rules=…\): 5 is missing or is not a logical axis": lambda: plan(rules=5),
        r"plan\(rules=…\): 'embed' -> 5": lambda: plan(rules={**nnxmoe.RULES, "embed": 5}),
        r"plan\(advise=5\): use True or False": lambda: plan(advise=5),
        r"plan\(compile_for=\['cpu'\]\): use": lambda: plan(compile_for=["cpu"]),
        r"plan\(across=5\): use the name": lambda: plan(across=5),
        "quantize=5 is not a quantization method": lambda: plan(quantize=5),
        "model is a int: pass an nnxmoe model": lambda: nnxmoe.quantize(5, nnxmoe.Int8()),
        "method=5 is not a quantization method": lambda: nnxmoe.quantize(model, 5),
        "method=None is not a quantization method": lambda: nnxmoe.quantize(model, None),
        "model is a str: pass an nnxmoe model": lambda: nnxmoe.unscan("demo"),
        r"Remat\(save=5\): use a tuple": lambda: nnxmoe.Remat(save=5),
        r"Remat\(offload=.*\): use a tuple": lambda: nnxmoe.Remat(offload=jnp.array(2)),
        "mesh=5: pass a mesh, such as": lambda: train.fit(model, [], optimizer=optax.sgd(0.1), steps=1, mesh=5),
        "mesh='': pass a mesh, such as": lambda: train.fit(model, [], optimizer=optax.sgd(0.1), steps=1, mesh=""),
        r"share=3: pass the index and": lambda: train.Batches(None, 2, 8, share=3),
        r"share=\('0', 2\): pass the index and": lambda: train.Batches(None, 2, 8, share=("0", 2)),
        r"targets=Array.*: pass the name of a projection": lambda: lora.add(model, 2, rngs=None, targets=jnp.array(2)),
        "reward=5: pass a function": lambda: train.GRPO(5),
        r"reward=.*2.*: pass a function": lambda: train.GSPO(jnp.array(2)),
        r"Objective\(head='whole'\)": lambda: train.Objective(head="whole"),
        r"Objective\(balance_loss='switch'\)": lambda: train.Objective(balance_loss="switch"),
        r"DPO\(loss='hinge'\)": lambda: train.DPO(loss="hinge"),
        r"DPO\(reference='base'\)": lambda: train.DPO(reference="base"),
        r"AdaptiveMLA\(max_queries='8'\)": lambda: nnxmoe.AdaptiveMLA("8"),
        r"TwoInt8Product\(max_rows=0\)": lambda: nnxmoe.TwoInt8Product(max_rows=0),
        r"TritonProduct\(max_rows=-1\)": lambda: nnxmoe.TritonProduct(max_rows=-1),
        "stop=.*pass non-empty strings": lambda: nnxmoe.complete(model, [[1]], stop=jnp.array(2)),
        "texts=5: pass a list of texts": lambda: nnxmoe.score(model, 5),
        "texts=Array.*: pass a list of texts": lambda: nnxmoe.score(model, jnp.array(2)),
        "tokenizer is a int: pass an nnxmoe.Tokenizer": lambda: list(nnxmoe.complete(model, [[1]], tokenizer=5)),
        "tokenizer is a NoneType: pass": lambda: list(nnxmoe.stream(model, None, [1], max_new_tokens=1)),
        r"compile_cache\(max_bytes='1'\): pass a positive": lambda: nnxmoe.compile_cache(max_bytes="1"),
        "devices is empty: pass at least one device": lambda: nnxmoe.make_mesh(-1, devices=[]),
        r"across=\['data'\] is not a mesh axis": lambda: nnxmoe.make_mesh(across=["data"]),
        r"merge\(keep=5\): pass True or False": lambda: lora.merge(model, keep=5),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_swapped_arguments_of_save_pretrained(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model is a .*Path: pass an"):
        nnxmoe.save_pretrained(tmp_path / "model", model)


def field(kind: Any, name: str, **others: Any) -> Callable[[Any], Any]:
    """A function that constructs an object with a value, and returns what the object stores of it."""
    return lambda value: getattr(kind(**others, **{name: value}), name)


def batches(value: Any, name: str) -> Any:
    documents: Any = SimpleNamespace(may_share_rows=True)
    return getattr(train.Batches(documents, **{"batch_size": 4, "seq_len": 8} | {name: value}), name)


def rank(value: Any) -> int:
    model = models.Mixtral(CONFIG, rngs=None)
    lora.add(model, value, rngs=None)
    return next(node.rank for _, node in nnx.iter_graph(model) if isinstance(node, LoRA))


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "Finetune.steps": field(Finetune, "steps", model="demo", data="x"),
    "Finetune.batch_size": field(Finetune, "batch_size", model="demo", data="x"),
    "Step.accumulate": lambda value: train.Step(models.Mixtral(CONFIG, rngs=None), SGD, accumulate=value).accumulate,
    "EarlyStopping.patience": field(train.EarlyStopping, "patience", metric="loss"),
    "Profile.steps": field(train.Profile, "steps", folder="p"),
    "Evaluation.every": field(train.Evaluation, "every", batches=[]),
    "Checkpoints.keep": field(train.Checkpoints, "keep", folder="c"),
    "Checkpoints.every": field(train.Checkpoints, "every", folder="c"),
    "ChunkedLoss.logits": field(train.ChunkedLoss, "logits"),
    "Batches.batch_size": lambda value: batches(value, "batch_size"),
    "Batches.seq_len": lambda value: batches(value, "seq_len"),
    "Batches.seed": lambda value: batches(value, "seed"),
    "Batches.epochs": lambda value: batches(value, "epochs"),
    "lora.add.rank": rank,
    "lora.split_ranks.rank": lambda value: lora.split_ranks(models.Mixtral(CONFIG, rngs=None), value)["attention.q"],
    "Pipeline.microbatches": field(nnxmoe.Pipeline, "microbatches"),
    "Pipeline.stages": field(nnxmoe.Pipeline, "stages", microbatches=4),
    "plan.batch": lambda value: nnxmoe.plan(CONFIG, {}, batch=value, seq=8).work.batch,
    "plan.seq": lambda value: nnxmoe.plan(CONFIG, {}, batch=4, seq=value).work.seq,
    "plan.accumulate": lambda value: nnxmoe.plan(CONFIG, {}, batch=4, seq=8, accumulate=value).work.accumulate,
    "plan.lora": lambda value: nnxmoe.plan(CONFIG, {}, batch=4, seq=8, lora=value).work.lora,
    "plan.mesh": lambda value: nnxmoe.plan(CONFIG, {"fsdp": value}, batch=4, seq=8).mesh["fsdp"],
    "search.devices": lambda value: search(CONFIG, value, batch=4, seq=8, most=1)[0].mesh["pipe"] * 4,
    "search.most": lambda value: len(search(CONFIG, 4, batch=4, seq=8, most=value)),
    "make_mesh": lambda value: nnxmoe.make_mesh(fsdp=value, devices=jax.devices()[:1] * 4).shape["fsdp"],
    "Int4.group": field(nnxmoe.Int4, "group"),
    "Float8.block": field(nnxmoe.Float8, "block"),
    "BlockwiseAttention.blocks": field(nnxmoe.BlockwiseAttention, "blocks"),
    "FlashAttention.block_q": field(nnxmoe.FlashAttention, "block_q"),
    "FlashAttention.block_k": field(nnxmoe.FlashAttention, "block_k"),
    "FusedAttention.max_head_dim": field(nnxmoe.FusedAttention, "max_head_dim"),
    "BlockwiseProduct.size": field(BlockwiseProduct, "size"),
    "Chunked.chunks": field(nnxmoe.Chunked, "chunks", inner=nnxmoe.Sorted()),
    "ChunkedExchange.chunks": field(nnxmoe.ChunkedExchange, "chunks", exchange=nnxmoe.RaggedAllToAll()),
    "AlignedMatmul.block": field(nnxmoe.AlignedMatmul, "block", inner=nnxmoe.BlockedMatmul()),
    "BlockedMatmul.block": field(nnxmoe.BlockedMatmul, "block"),
    "PromptLookup.count": field(nnxmoe.PromptLookup, "count"),
    "config": lambda value: dataclasses.replace(CONFIG, num_local_experts=value).num_local_experts,
    "config.eos_token_id": lambda value: dataclasses.replace(CONFIG, eos_token_id=[value]).eos_token_id[0],
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "Finetune.lora_alpha": field(Finetune, "lora_alpha", model="demo", data="x", lora=2),
    "EarlyStopping.min_delta": field(train.EarlyStopping, "min_delta", metric="loss"),
    "Step.bias_rate": lambda value: train.Step(
        models.Mixtral(CONFIG, rngs=None), SGD, bias_rate=value
    ).definition.bias_rate,
    "Objective.z_loss": field(train.Objective, "z_loss"),
    "Objective.balance": field(train.Objective, "balance"),
    "Objective.mtp": field(train.Objective, "mtp"),
    "DPO.beta": field(train.DPO, "beta"),
    "DPO.balance": field(train.DPO, "balance"),
    "Capacity.factor": field(nnxmoe.Capacity, "factor"),
    "RaggedAllToAll.buffer_factor": field(nnxmoe.RaggedAllToAll, "buffer_factor"),
    "plan.buffer_factor": lambda value: nnxmoe.plan(
        CONFIG, {"expert": 4}, batch=4, seq=8, buffer_factor=value
    ).work.buffer_factor,
    "Hardware.flops": lambda value: dataclasses.replace(hardware("h100"), flops=value).flops,
    "config": lambda value: dataclasses.replace(CONFIG, rope_theta=value).rope_theta,
}
ODD_NUMBERS: tuple[Any, ...] = (True, np.True_, jnp.asarray(True), float("nan"), np.float32("inf"), "4", 4j)
ODD_NUMBERS += (np.asarray([4, 4]), jnp.asarray([4]), object(), int)


def check_door(call: Callable[[Any], Any], kind: type, scalars: list[Any], odd: tuple[Any, ...]) -> None:
    for scalar in scalars:
        stored = call(scalar)
        assert type(stored) is kind and stored == 4, f"{scalar!r}"
    for value in odd:
        with pytest.raises(ValueError):
            call(value)
    with pytest.raises(ValueError, match="traced value"):
        jax.jit(call)(4)


@pytest.mark.parametrize("name", INTEGERS)
def test_scalars_of_array_libraries_are_integers(name: str) -> None:
    """They are stored as ints, so that objects keep a hash, can be written as JSON and be static in programs."""
    scalars = [4, np.int64(4), np.uint8(4), np.asarray(4), jnp.int32(4), jnp.uint8(4)]
    scalars += [] if name.startswith("config") else [4.0, jnp.bfloat16(4)]
    check_door(INTEGERS[name], int, scalars, (*ODD_NUMBERS, 1.5, np.float32(1.5)))


@pytest.mark.parametrize("name", NUMBERS)
def test_scalars_of_array_libraries_are_numbers(name: str) -> None:
    scalars = [np.float64(4), np.float32(4), np.asarray(4.0), jnp.bfloat16(4), jnp.float32(4)]
    check_door(NUMBERS[name], float, scalars, ODD_NUMBERS)


def test_scalars_within_fields() -> None:
    """Lists and mappings of a config have Python values too."""
    scaling = {"rope_type": "linear", "factor": np.float32(2)}
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, eos_token_id=[np.int64(1), jnp.int32(2)])
    assert config == dataclasses.replace(CONFIG, rope_scaling={**scaling, "factor": 2.0}, eos_token_id=[1, 2])
    assert json.loads(json.dumps(config.to_hf()))["rope_scaling"]["factor"] == 2.0
