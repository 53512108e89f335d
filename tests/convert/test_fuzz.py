"""10,000 random headers, indexes and configs: each is either refused or valid by an independent check."""

import json
import logging
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nnxmoe
from nnxmoe.convert.files.safetensors import read_header
from nnxmoe.convert.storage.checkpoint import Checkpoint
from tests.corpus.case import CONFIG, INDEX, ONE, TWO, layout, pack
from tests.corpus.second_opinion import WIDTHS, sound_config, sound_container, sound_index
from tests.support.tiny import TINY

HEADERS, INDEXES, CONFIGS = 4000, 2500, 3500


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Hypothesis settings with the same examples in every run."""
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=slow)


def answer(call: Callable[[], Any], where: str) -> bool:
    """Whether ``call`` succeeds; a failure must be a CheckpointError whose message contains ``where``."""
    try:
        call()
        return True
    except nnxmoe.CheckpointError as error:
        assert where in str(error) and len(str(error)) < 2000, error
        return False


# Headers

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int8), "c": np.zeros((0, 2))}
HEADER, DATA = layout(ARRAYS)
NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 60),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.sampled_from(sorted(WIDTHS)),
    st.lists(st.integers(-3, 60), max_size=4),
    st.lists(st.integers(0, 2**66), max_size=3),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 24, 29, True, False, 2.0, "3", None]), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-1, 9), max_size=2),
)


@st.composite
def files(draw: Any) -> bytes:
    """A valid file with a few random changes to its header fields and possibly its bytes."""
    header, data = json.loads(json.dumps(HEADER)), bytearray(DATA)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*ARRAYS, "__metadata__", "new"]))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", None]))
        value = draw(NASTY)
        if field is None or not isinstance(header.get(name), dict):
            header[name] = value
        else:
            header[name][field] = value
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(header)))
        if isinstance(header[name], dict) and isinstance(header[name].get("data_offsets"), list):
            shift = [draw(st.integers(-8, 8)), draw(st.integers(-8, 8))]
            offsets = [o + s for o, s in zip(header[name]["data_offsets"], shift, strict=False) if isinstance(o, int)]
            header[name]["data_offsets"] = offsets
    text = json.dumps(header).encode() + b" " * draw(st.integers(0, 3))
    length = len(text) + draw(st.sampled_from([0] * 8 + [-1, 1, 8, 2**40, -len(text)]))
    raw = bytearray(struct.pack("<Q", length % 2**64) + text + data)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 5]))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.sampled_from([0] * 6 + [1, 3, 9, 100]))
    return bytes(raw[: len(raw) - cut]) + bytes(draw(st.sampled_from([0] * 6 + [1, 8])))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    """Suppress thousands of warnings, which would hide a failure."""
    logger = logging.getLogger("nnxmoe")
    level = logger.level
    logger.setLevel("ERROR")
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.slow
def test_random_headers(folder: Path) -> None:
    taken = 0

    @fuzz(HEADERS)
    @given(files())
    def check(data: bytes) -> None:
        nonlocal taken
        path = folder / "model.safetensors"
        path.write_bytes(data)
        if answer(lambda: read_header(path), str(path)):
            taken += 1
            assert sound_container(data)

    check()
    assert taken > HEADERS / 50, "the fuzz makes hardly any sound file: it tests nothing"


# Indexes

HOLDS = {ONE: {"a", "b"}, TWO: {"c"}, "extra.safetensors": {"a", "d"}, "sub/x.safetensors": {"a"}}
PLACES = st.sampled_from(
    [ONE, TWO, "extra.safetensors", "gone.safetensors", "../outside.safetensors", "sub/x.safetensors", "/etc/passwd",
     f"./{ONE}", f"sub/../{ONE}", f"{ONE}\0", ONE.upper(), "..", ".", "", "config.json", f" {ONE}", f"{ONE}/", "~"]
)  # fmt: skip
VALUES = st.one_of(PLACES, PLACES, PLACES, st.text(max_size=8), st.none(), st.integers(), st.lists(PLACES, max_size=2))
SOUND_MAP = {"a": ONE, "b": ONE, "c": TWO}


@pytest.mark.slow
def test_random_indexes(folder: Path) -> None:
    model = folder / "model"
    (model / "sub").mkdir(parents=True)
    for place in ("../outside.safetensors", "sub/x.safetensors"):
        (model / place).write_bytes(pack({"a": ARRAYS["a"]}))
    for file, names in HOLDS.items():
        (model / file).write_bytes(pack({name: ARRAYS["a"] for name in sorted(names)}))
    (model / CONFIG).write_text("{}")
    taken = 0

    @fuzz(INDEXES)
    @given(
        st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "__metadata__", ""]), VALUES, max_size=2),
        st.sampled_from([None, [], "x", {}]),
        st.integers(0, 20),
    )
    def check(changes: dict[str, Any], other: Any, dice: int) -> None:
        nonlocal taken
        index: Any = {"metadata": other, "weight_map": SOUND_MAP | changes}
        if dice == 0:
            index = {"weight_map": other} if other != {} else other
        (model / INDEX).write_text(json.dumps(index))

        def open_it() -> None:
            with Checkpoint.open(model) as checkpoint:
                assert all(model in file.parents for file in checkpoint.files)

        if answer(open_it, str(model)):
            taken += 1
            assert sound_index(str(model), index, HOLDS)

    check()
    assert taken > INDEXES / 50


# Configs

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from(
        [0, 1, 2, 3, 4, 6, 8, 9, 16, 24, 48, 52, 53, 54, 64, 2000, 5000, 2**30, 10**12, 2**31, -1, 10**30, 10**400]
    ),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-30, 1e300, 0.5, 2.0, float("inf"), float("nan")]),
)
FIELD_VALUES = st.one_of(
    NUMBERS, NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.lists(NUMBERS, max_size=2),
    st.sampled_from(["silu", "gelu", "sigmoid", "softmax", "noaux_tc", "llama", "mixtral", "true", {}, {"a": 1}]),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.wrong_types
def test_random_configs() -> None:
    taken = 0

    @fuzz(CONFIGS)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal taken
        fields = dict(TINY[data.draw(st.sampled_from(sorted(TINY)))])
        for _ in range(data.draw(st.integers(1, 3))):
            fields[data.draw(st.sampled_from(sorted(fields.keys() - {"model_type"})))] = data.draw(FIELD_VALUES)
        try:
            config = nnxmoe.config_from_hf(fields)
        except nnxmoe.ConfigError as error:
            assert any(name in str(error) for name in fields) and len(str(error)) < 1000, error
            return
        taken += 1
        assert sound_config(fields), fields
        assert nnxmoe.config_from_hf(config.to_hf()) == config

    check()
    assert taken > CONFIGS / 50


ROPE_FIELDS = """rope_type type factor low_freq_factor high_freq_factor beta_fast beta_slow mscale mscale_all_dim
attention_factor truncate rope_theta original_max_position_embeddings""".split()
ROPES = st.dictionaries(
    st.sampled_from(ROPE_FIELDS),
    st.one_of(FIELD_VALUES, st.sampled_from(["linear", "dynamic", "llama3", "yarn", "default", "longrope"])),
    max_size=6,
)


@pytest.mark.slow
@pytest.mark.wrong_types
@fuzz(1000)
@given(st.sampled_from(sorted(TINY)), ROPES, st.sampled_from(["rope_scaling", "rope_parameters"]))
def test_random_rope_parameters(kind: str, rope: dict[str, Any], where: str) -> None:
    """Accepted configs give finite, positive frequencies."""
    try:
        config = nnxmoe.config_from_hf(TINY[kind] | {where: rope})
    except nnxmoe.ConfigError as error:
        assert "rope" in str(error) or "factor" in str(error), error
        return
    frequencies = np.asarray(config.rope.frequencies(jnp.int32(3)))
    assert np.isfinite(frequencies).all() and (frequencies > 0).all(), (rope, frequencies)
    assert np.isfinite(getattr(config, "softmax_scale", 1.0))
