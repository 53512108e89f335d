"""GGUF files, written by the ``gguf`` library: every family, type and tokenizer, splits, codes, and malformed files."""

import dataclasses
import json
import math
import re
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.apps.cli import main
from nnxmoe.convert.arrays.boxes import whole
from nnxmoe.convert.arrays.lazy_array import LazyArray
from nnxmoe.convert.files.errors import CheckpointError
from nnxmoe.convert.files.hub import DEMO
from nnxmoe.convert.formats.gguf_tensors import _array
from nnxmoe.convert.gguf.gguf_config import config_fields
from nnxmoe.convert.gguf.gguf_file import GGUF, GGUFInfo
from nnxmoe.convert.gguf.gguf_tokenizer import _SPLITS
from nnxmoe.convert.hf import pretrained
from nnxmoe.convert.storage.checkpoint import Checkpoint
from nnxmoe.models import config_from_hf, model_class
from tests.support import families, llama_cpp, mtp
from tests.support.gguf import quantised, write
from tests.support.tiny import ORACLE, TINY, Fields, Weights, random_tokens, tiny_weights

# What a GGUF file cannot say: windows, biases that llama.cpp has no name for, constants of gpt-oss.
_PLAIN: Fields = {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
_CHANGES: dict[str, Fields] = {
    "llama": {"mlp_bias": False, "attention_bias": False},
    **{kind: {"sliding_window": None} for kind in ("mistral", "mixtral")},
    "deepseek_v3": {"attention_bias": False},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": None},
    **{kind: _PLAIN for kind in ("qwen2", "qwen3")},
    "qwen3_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False},
    **{kind: {} for kind in ("deepseek_v2", "glm4_moe", "kimi_k2")},
}
_SAID = ("hidden_size", "num_hidden_layers", "vocab_size", "head_width", "rms_norm_eps", "rope_theta", "windows")


def case(kind: str, **changes: Any) -> tuple[Fields, Weights, nnxmoe.CausalLM]:
    """Fields, random weights and the model of a family, small."""
    fields = (TINY[kind] if kind in TINY else families.load(kind).fields) | _CHANGES[kind] | changes
    config = config_from_hf(fields)
    fields["rms_norm_eps"] = config.rms_norm_eps
    model = model_class(config)(config, ORACLE, rngs=nnx.Rngs(0))
    weights = families.weights_of({name: array.shape for name, array in pretrained.arrays(model).items()})
    return fields, weights, model


def written(model: nnxmoe.CausalLM) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in pretrained.arrays(model).items()}


@pytest.mark.parametrize("kind", _CHANGES)
def test_families_load_to_the_bit(kind: str, tmp_path: Path) -> None:
    fields, weights, model = case(kind)
    found = nnxmoe.from_pretrained(write(tmp_path / "model.gguf", fields, weights), strategy=ORACLE)
    same = written(found)
    assert same.keys() == weights.keys()
    for name, values in weights.items():
        np.testing.assert_array_equal(same[name], values, err_msg=name)
    assert [getattr(found.config, name) for name in _SAID] == [getattr(model.config, name) for name in _SAID]
    report = found.load_report
    assert report is not None and not (report.unexpected or report.notes or report.skipped)
    nnx.update(model, nnx.state(found))
    tokens = random_tokens(2, 7, fields["vocab_size"])
    np.testing.assert_allclose(found(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.wrong_types  # changes defaults, which annotated functions do not have
def test_the_halves_of_the_latent_projection_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the blocks are, and of a part its own heads only."""
    from nnxmoe.convert.formats import gguf_tensors

    fields, weights, _ = case("deepseek_v3")
    file = write(tmp_path / "model.gguf", fields, weights)
    decoded: Counter[str] = Counter()
    joined = gguf_tensors._joined

    def counted(halves: Mapping[str, LazyArray], *rest: Any) -> LazyArray:
        def half(array: LazyArray) -> LazyArray:
            def read(box: Any, empty: Any) -> np.ndarray:
                decoded[array.tensors[0]] += box[0].stop - box[0].start
                return array.read_box(box, empty)

            return dataclasses.replace(array, read_box=read)

        return joined({name: half(array) for name, array in halves.items()}, *rest)

    monkeypatch.setattr(gguf_tensors, "_joined", counted)
    monkeypatch.setattr(LazyArray.__init__, "__defaults__", (64, *LazyArray.__init__.__defaults__[1:]))  # its block
    nnxmoe.from_pretrained(file)
    heads = fields["num_attention_heads"]
    assert len(decoded) == 2 * fields["num_hidden_layers"] and set(decoded.values()) == {heads}
    decoded.clear()
    arrays = gguf_tensors.gguf_arrays(Checkpoint.open(file))
    name = next(name for name in arrays if name.endswith("layers.0.self_attn.kv_b_proj.weight"))
    full = np.asarray(arrays[name])
    decoded.clear()
    some = slice(1, len(full) // heads)
    np.testing.assert_array_equal(arrays[name].rows(some), full[some])
    assert set(decoded.values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "Q8_0"), ("gpt_oss", "F32"), ("gpt_oss", "Q5_0")])
@pytest.mark.parametrize("keep", [False, True])
def test_gate_and_up_may_share_a_tensor(kind: str, name: str, keep: bool, tmp_path: Path) -> None:
    fields, weights, _ = case(kind, **_WIDE, moe_intermediate_size=32)
    files = [
        write(tmp_path / f"{fused}.gguf", fields, weights, quantised(name), fused=fused) for fused in (False, True)
    ]
    apart, together = (nnxmoe.from_pretrained(file, keep_quantized=keep, strategy=ORACLE) for file in files)
    assert together.load_report is not None and not together.load_report.unexpected
    for (path, one), (_, other) in zip(
        nnx.to_flat_state(nnx.state(apart)), nnx.to_flat_state(nnx.state(together)), strict=True
    ):
        np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=str(path))


def test_the_rotation_of_llama3_is_found_from_its_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 16, "rope_theta": 500.0}
    fields, weights, _ = case("llama", rope_parameters=rope)
    file = write(tmp_path / "model.gguf", fields, weights)
    found = nnxmoe.from_pretrained(file)
    assert dict(found.config.rope_fields) == {name: value for name, value in rope.items() if name != "rope_theta"}
    infos = GGUF.open(file).tensors
    data = bytearray(file.read_bytes())
    at = infos["rope_freqs.weight"].begin + 8
    data[at : at + 4] = struct.pack("<f", 1.5)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight has factors that differ from Llama 3's"):
        nnxmoe.from_pretrained(file)


def test_heads_that_rotate_are_reordered_by_head(tmp_path: Path) -> None:
    """The order of the file is another one: planting no reordering must show."""
    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights)
    infos = GGUF.open(file).tensors
    info = infos["blk.0.attn_q.weight"]
    stored = np.frombuffer(file.read_bytes()[info.begin : info.end], "<f4").reshape(info.values)
    assert not np.array_equal(stored, weights["model.layers.0.self_attn.q_proj.weight"])


def _kinds() -> list[str]:
    odd = ("Q8_1", "Q8_K", "Q1_0")  # which the library names and does not decode
    return [kind.name for kind in gguf.GGML_QUANT_SIZES if kind.name not in odd and kind.name[0] in "QITMN"
            and kind.name not in ("I8", "I16", "I32", "I64")]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize("name", _kinds())
def test_types_decode_as_in_the_library(name: str, tmp_path: Path) -> None:
    """Random blocks: every box equals the same box of what the library decodes, infinite scales included."""
    kind = gguf.GGMLQuantizationType[name]
    group, width = gguf.GGML_QUANT_SIZES[kind]
    experts, outs, ins = 3, 5, 4 * group
    octets = np.random.default_rng(0).integers(0, 256, (experts, outs, 4 * width)).astype(np.uint8)
    if name == "MXFP4":  # 255 is NaN
        octets[..., ::width] = octets[..., ::width] % 200 + 20
    file = tmp_path / "blocks"
    file.write_bytes(octets.tobytes())
    info = GGUFInfo("w", file, "U8", octets.shape, 0, octets.nbytes, kind=name, values=(experts, outs, ins))
    wanted = gguf.dequantize(octets, kind)
    array = _array(info, _Files(octets))
    for box in (whole((experts, outs, ins)), (slice(1, 3), slice(2, 4), slice(group + 3, 3 * group - 1))):
        np.testing.assert_array_equal(array.read_box(box, np.empty), wanted[box])
    assert (array.kind, array.load_dtype, array.stored) == (name, np.float32, (name, octets.nbytes))


class _Files(Checkpoint):
    """The reads of an opened checkpoint with one tensor."""

    def __init__(self, octets: np.ndarray) -> None:
        self.octets = octets

    def read_into(self, info: Any, out: np.ndarray, rows: Any = None, cols: Any = None) -> None:
        expert = info.begin // (self.octets[0].nbytes)
        part = self.octets if len(info.shape) == 3 else self.octets[expert]
        out[...] = part if rows is None else part[rows, cols or slice(None)]


_WIDE: Fields = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "Q8_0"), ("llama", "Q4_0"), ("mixtral", "Q4_1"), ("gpt_oss", "MXFP4")]
)
def test_kept_codes_change_no_number(kind: str, name: str, tmp_path: Path) -> None:
    fields, weights, _ = case(kind, **_WIDE)
    file = write(tmp_path / "model.gguf", fields, weights, quantised(name))
    floats, kept = (nnxmoe.from_pretrained(file, keep_quantized=keep, strategy=ORACLE) for keep in (False, True))
    assert floats.load_report is not None and kept.load_report is not None
    assert set(floats.load_report.weights) == {"float32"} and len(kept.load_report.weights) == 2
    tokens = random_tokens(2, 9, fields["vocab_size"])
    wanted = np.asarray(floats(tokens).logits)
    np.testing.assert_allclose(kept(tokens).logits, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    again = nnxmoe.model.quantization.quantized_kernels.dequantize(kept)
    for (path, ours), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(again)), nnx.to_flat_state(nnx.state(floats)), strict=True
    ):
        np.testing.assert_array_equal(ours.get_value(), theirs.get_value(), err_msg=str(path))
    nnxmoe.save(kept, tmp_path / "native")
    loaded = nnxmoe.load(tmp_path / "native", strategy=ORACLE)
    np.testing.assert_array_equal(loaded(tokens).logits, kept(tokens).logits)
    if name == "Q4_1":
        with pytest.raises(CheckpointError, match=r"has offsets, which compressed-tensors cannot store"):
            nnxmoe.save_pretrained(kept, tmp_path / "hf")
    elif kind == "llama":
        nnxmoe.save_pretrained(kept, tmp_path / "hf")
        back = nnxmoe.from_pretrained(tmp_path / "hf", keep_quantized=True, strategy=ORACLE)
        np.testing.assert_allclose(back(tokens).logits, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_types_that_are_not_kept_are_rounded_again_by_name(tmp_path: Path) -> None:
    fields, weights, _ = case("qwen3_moe", **_WIDE, moe_intermediate_size=32)
    file = write(tmp_path / "model.gguf", fields, weights, quantised("Q5_1"))
    kept = nnxmoe.from_pretrained(file, keep_quantized=True)
    rounded = nnxmoe.from_pretrained(file, quantize=nnxmoe.Int8())
    assert kept.load_report is not None and set(kept.load_report.weights) == {"float32"}
    assert rounded.load_report is not None and rounded.load_report.weights["int8"] > 0
    assert 0 < (rounded.load_report.quantization_error or 0) < 0.02


def split(file: Path, most: int) -> list[Path]:
    """Rewrite a file as several, as `llama-gguf-split` does."""
    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(file.with_name("split.gguf"), arch, split_max_tensors=most)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == 9 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(file.parent.glob("split-*.gguf"))


def test_split_files_are_one_model(tmp_path: Path) -> None:
    fields, weights, _ = case("mixtral")
    whole_file = write(tmp_path / "model.gguf", fields, weights)
    parts = split(whole_file, 8)
    assert len(parts) > 2
    wanted = written(nnxmoe.from_pretrained(whole_file))
    found = written(nnxmoe.from_pretrained(parts[1]))
    assert all(np.array_equal(found[name], values) for name, values in wanted.items())
    moved = parts[1].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"split-00002-of-\d+.gguf is not in the folder: download it"):
        nnxmoe.from_pretrained(parts[0])
    moved.rename(parts[1])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"restore the original name"):
        nnxmoe.from_pretrained(parts[0])


# Tokenizers


def tokenizer_fields(folder: Path, split_by: str = "gpt-2") -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = (folder / "chat_template.jinja").read_text()
    ids = dict(stored["model"]["vocab"]) | {token["content"]: token["id"] for token in stored["added_tokens"]}
    special = {token["id"] for token in stored["added_tokens"]}
    tokens = [text for text, _ in sorted(ids.items(), key=lambda pair: pair[1])]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    found = {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split_by, "tokenizer.ggml.tokens": tokens},
        **{"tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))]},
        **{"tokenizer.ggml.merges": merges, "tokenizer.chat_template": template},
    }
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    found["tokenizer.ggml.eot_token_id"] = ends[0]  # the end of a turn
    for name, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}.items():
        if isinstance(text := config.get(name), str):
            found[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    return found


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a GGUF file."""
    from safetensors.numpy import load_file

    fields = json.loads((DEMO / "config.json").read_text())
    weights = {name: np.asarray(values, np.float32) for name, values in load_file(DEMO / "model.safetensors").items()}
    file = tmp_path_factory.mktemp("demo") / "demo.gguf"
    return write(file, fields, weights, metadata=tokenizer_fields(DEMO))


@pytest.mark.slow
def test_a_file_answers_as_its_folder(demo_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "What is 47 + 38?"}]
    sides = [(nnxmoe.from_pretrained(one), nnxmoe.Tokenizer.from_pretrained(one)) for one in (DEMO, demo_file)]
    answers = [next(iter(nnxmoe.complete(*pair[:1], [chat], pair[1], max_new_tokens=24))) for pair in sides]
    assert answers[0].ids == answers[1].ids and answers[1].text == "47 + 38 = 85."
    assert next(iter(nnxmoe.complete(sides[1][0], [chat], max_new_tokens=4))).ids == answers[0].ids[:4]
    nnxmoe.save_pretrained(sides[1][0], tmp_path / "saved")
    saved = nnxmoe.Tokenizer.from_pretrained(tmp_path / "saved")
    assert saved.apply_chat_template(chat) == sides[0][1].apply_chat_template(chat)
    assert saved.encode("One,  two: 17 élan") == sides[0][1].encode("One,  two: 17 élan")
    assert main(["inspect", str(demo_file)]) == 0
    assert "0 missing, 0 belong to no parameter" in capsys.readouterr().out
    assert main(["generate", str(demo_file), "Q: ", "--max-new-tokens", "4"]) == 0
    assert main(["convert", str(demo_file), str(tmp_path / "converted"), "--to", "hf", "--verify"]) == 0
    assert "verified: all arrays are equal" in capsys.readouterr().out


def sentencepiece() -> dict[str, Any]:
    """A vocabulary with scores, bytes, a control token and one that is matched as a whole."""
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "1"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{octet:02X}>" for octet in range(256)), *words, "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    scores = [0.0] * 259 + [-1.0 * number for number in range(len(words))] + [0.0]
    return {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds},
        **{"tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_merges_come_from_the_scores(tmp_path: Path) -> None:
    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights, metadata=sentencepiece())
    tokenizer = nnxmoe.Tokenizer.from_pretrained(file)
    texts = [tokenizer.backend.id_to_token(number) for number in tokenizer.encode("abc abc é<tool>bc</s>")]
    # "ab" scores above "bc", so "abc" is "ab" + "c", which no pair above it forms.
    assert texts == ["<s>", "▁abc", "▁abc", "▁", "<0xC3>", "<0xA9>", "<tool>", "▁", "bc", "</s>"]
    assert tokenizer.decode(tokenizer.encode("abc é 1")) == "<s> abc é 1"
    assert tokenizer.decode(tokenizer.encode("abc é 1"), skip_special_tokens=True) == "abc é 1"
    assert 2 in tokenizer.special_ids and tokenizer.backend.token_to_id("<tool>") not in tokenizer.special_ids


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert' is not supported; supported: gpt2 and llama"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "jina"}, "tokenizer.ggml.pre 'jina'"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores has 1 entries, but there are 271 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
        ({"tokenizer.ggml.eos_token_id": 999}, "tokenizer.ggml.eos_token_id is 999, but there are 271 tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be a list of strings"),
    ],
)
def test_tokenizers_that_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights, metadata=sentencepiece() | change)
    with pytest.raises(CheckpointError, match=says.replace("[", r"\[")):
        nnxmoe.Tokenizer.from_pretrained(file)


def test_tokenizers_give_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    """Spaces after special tokens, absent keys and every kind of splits, against ids that llama.cpp computed."""
    expected = json.loads(llama_cpp.DATA.read_text())
    every = llama_cpp.cases(llama_cpp.DISTINCT)
    assert expected.keys() == every.keys()
    for name, metadata in every.items():
        tokenizer = nnxmoe.Tokenizer.from_pretrained(llama_cpp.write(tmp_path / f"{name}.gguf", metadata))
        for text, ids in zip(llama_cpp.TEXTS, expected[name], strict=True):
            assert tokenizer.encode(text) == ids, (name, text)


@pytest.mark.oracle
def test_every_tokenizer_gives_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    for name, metadata in llama_cpp.cases(_SPLITS).items():
        file = llama_cpp.write(tmp_path / f"{name}.gguf", metadata)
        tokenizer, rng = nnxmoe.Tokenizer.from_pretrained(file), np.random.default_rng(0)
        parts = [
            "</s>",
            "<s>",
            "<tool>",
            " ",
            "  ",
            "\n",
            *metadata["tokenizer.ggml.tokens"][260:290],
            "Ab1",
            "é漢",
            "'s",
        ]
        texts = [*llama_cpp.TEXTS, *("".join(rng.choice(parts, size=8)) for _ in range(20))]
        for text, ids in zip(texts, llama_cpp.ids(file, texts), strict=True):
            assert tokenizer.encode(text) == ids, (name, text)


def test_infill_tokens_are_matched_whatever_their_type(tmp_path: Path) -> None:
    spm = llama_cpp.sentencepiece()
    names = {"1": "<PRE>", "o": "<SUF>"}
    tokens = {"tokenizer.ggml.tokens": [names.get(token, token) for token in spm["tokenizer.ggml.tokens"]]}
    tokenizer = nnxmoe.Tokenizer.from_pretrained(llama_cpp.write(tmp_path / "infill.gguf", spm | tokens))
    # computed by llama.cpp
    assert tokenizer.encode("<PRE> abc<SUF>ab <PRE>") == [1, 287, 259, 280, 267, 277, 259, 287]
    for key in ("fim_pre", "prefix"):  # then <PRE> is an ordinary token
        named = tokens | {f"tokenizer.ggml.{key}_token_id": 5}
        tokenizer = nnxmoe.Tokenizer.from_pretrained(llama_cpp.write(tmp_path / f"{key}.gguf", spm | named))
        assert 287 not in tokenizer.encode("<PRE> abc")


def test_special_tokens_that_a_file_does_not_name(tmp_path: Path) -> None:
    """The format's default ids, and the texts of tokens that end an answer."""
    spm, bpe = llama_cpp.sentencepiece(), llama_cpp.byte_level()
    config = nnxmoe.from_pretrained(llama_cpp.write(tmp_path / "spm.gguf", spm)).config
    tokens = spm["tokenizer.ggml.tokens"]
    assert (config.bos_token_id, config.eos_token_id) == (1, (2, tokens.index("<|im_end|>")))
    config = nnxmoe.from_pretrained(llama_cpp.write(tmp_path / "bpe.gguf", bpe)).config
    assert (config.bos_token_id, config.eos_token_id) == (None, (1, 2))  # 11 is no control token here
    few = {"tokenizer.ggml.tokens": bpe["tokenizer.ggml.tokens"][:9], "tokenizer.ggml.token_type": [3] * 9}
    file = llama_cpp.write(tmp_path / "few.gguf", bpe | few | {"tokenizer.ggml.add_bos_token": True})
    with pytest.raises(CheckpointError, match=r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"):
        nnxmoe.Tokenizer.from_pretrained(file)


def test_padding_and_separators_of_infill_prompts_end_generation(tmp_path: Path) -> None:
    """As in llama.cpp. A key's id takes precedence over the tokens' texts."""
    spm, key = llama_cpp.sentencepiece(), "tokenizer.ggml."
    names = {"1": "<|fim_pad|>", "o": "<reponame>", "h": "<|file_sep|>", "d": "<PRE>"}
    tokens = [names.get(token, token) for token in spm[f"{key}tokens"]]
    for named, texts in (({}, set(names.values()) - {"<PRE>"}), ({f"{key}fim_pad_token_id": 5}, {"<|file_sep|>"})):
        named |= {f"{key}fim_rep_token_id": 6} if named else {}
        file = llama_cpp.write(tmp_path / f"{len(named)}.gguf", spm | {f"{key}tokens": tokens} | named)
        wanted = {2, tokens.index("<|im_end|>"), *map(tokens.index, texts), *named.values()}
        assert set(nnxmoe.from_pretrained(file).config.eos_token_id) == wanted


def test_files_without_the_suffix_are_found_by_their_first_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blobs of Ollama, and the files that links of the hub's cache point to."""
    metadata = llama_cpp.sentencepiece()
    blob = llama_cpp.write(tmp_path / "sha256-6a0746a1ec1a", metadata)
    (tmp_path / "link").symlink_to(blob)
    for path in (blob, str(blob), tmp_path / "link"):
        assert nnxmoe.from_pretrained(path).config.model_type == "llama"
        assert nnxmoe.Tokenizer.from_pretrained(path).encode("abc")[0] == 1
    assert main(["inspect", str(blob)]) == 0
    assert "0 missing, 0 belong to no parameter" in capsys.readouterr().out
    assert main(["convert", str(blob), str(tmp_path / "converted"), "--to", "hf", "--verify"]) == 0
    assert nnxmoe.Tokenizer.from_pretrained(tmp_path / "converted").encode("</s>abc")[2] == metadata[
        "tokenizer.ggml.tokens"
    ].index("▁abc")
    with pytest.raises(ValueError, match="is a complete model: pass the path of the file"):
        nnxmoe.from_pretrained(tmp_path)
    (tmp_path / "text").write_bytes(b"GGU")
    with pytest.raises(CheckpointError, match="is not a folder"):
        nnxmoe.from_pretrained(tmp_path / "text")


def test_saved_models_have_the_sampling_and_the_end_ids_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = llama_cpp.sentencepiece() | {
        **{"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.25},
        "general.sampling.mirostat": 1,
    }
    model = nnxmoe.from_pretrained(llama_cpp.write(tmp_path / "model.gguf", metadata))
    assert model.load_report is not None
    assert any("general.sampling.mirostat" in note for note in model.load_report.notes)
    options = nnxmoe.Sampling.from_checkpoint(model)
    assert (options.temperature, options.top_k, options.repetition_penalty) == (0.5, 20, 1.25)
    nnxmoe.save_pretrained(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["bos_token_id"] == 1 and saved["eos_token_id"][0] == 2 and saved["temperature"] == 0.5
    nnxmoe.train.lora.add(model, rank=2, rngs=nnx.Rngs(0))
    nnxmoe.train.lora.save(model, tmp_path / "adapter")
    assert "which peft cannot load" in caplog.text


def test_files_of_the_hub_are_fetched_with_their_splits(
    demo_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)  # where no folder has such a name
    (tmp_path / "Q8_0").mkdir()
    (tmp_path / "Q8_0" / "demo.gguf").symlink_to(demo_file)
    model = nnxmoe.from_pretrained("org/demo-GGUF/Q8_0/demo.gguf")
    assert model.config.model_type == "mixtral" and asked == [("org/demo-GGUF", ["Q8_0/demo.gguf"])]
    assert nnxmoe.Tokenizer.from_pretrained("org/demo-GGUF/Q8_0/demo.gguf").chat_template
    with pytest.raises(CheckpointError, match=r"org/demo-GGUF has no file x-00001-of-00003\.gguf at this revision"):
        nnxmoe.from_pretrained("org/demo-GGUF/x-00001-of-00003.gguf")
    assert asked[-1] == ("org/demo-GGUF", ["x-*-of-00003.gguf"])
    with pytest.raises(CheckpointError, match=r"download the file \(hf download\) and pass its path"):
        main(["inspect", "org/demo-GGUF/Q8_0/demo.gguf", "--debug"])
    with pytest.raises(ValueError, match=r"demo\.gguf is a complete model: pass the path of the file"):
        nnxmoe.from_pretrained(tmp_path / "Q8_0")


@pytest.mark.slow
def test_prediction_layers(tmp_path: Path) -> None:
    fields = mtp.fields_of("glm4_moe", 1) | {"rms_norm_eps": 1e-5}
    config = config_from_hf(fields)
    model = model_class(config)(config, ORACLE, rngs=nnx.Rngs(0), mtp=True)
    weights = families.weights_of({name: array.shape for name, array in pretrained.arrays(model).items()})
    file = write(tmp_path / "model.gguf", fields, weights)
    found, without = (nnxmoe.from_pretrained(file, strategy=ORACLE, mtp=wanted) for wanted in (True, False))
    assert len(found.mtp) == 1 and not without.mtp and without.load_report is not None
    assert list(without.load_report.skipped) == ["multi-token prediction layers (not part of the model)"]
    copied = ("embed_tokens.weight", "shared_head.head.weight")
    for name, values in written(found).items():
        if not name.endswith(copied) or name.startswith("model.embed"):
            np.testing.assert_array_equal(values, weights[name], err_msg=name)


# Beside transformers


def trained() -> dict[str, Any]:
    """The metadata of a byte-level vocabulary, trained on the text of this package."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(nnxmoe.__file__).parent.rglob("*.py"))[:40]]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, special_tokens=["<|end|>"])  # type: ignore[call-arg]
    backend.train_from_iterator([*texts, *SAMPLES * 20], trainer)
    stored = json.loads(backend.to_str())["model"]
    tokens = [text for text, _ in sorted(stored["vocab"].items(), key=lambda pair: pair[1])]
    return {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0},
        **{
            "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["merges"]],
            "tokenizer.ggml.add_bos_token": False,
        },
        "tokenizer.ggml.token_type": [3, *[1] * (len(tokens) - 1)],
    }


SAMPLES = [
    "Hello world, it's 12345 o'clock!  I'M  here\n\n\tfoo",
    "def f(x):\n    return x**2  # ok",
    "漢字とかな \N{FULLWIDTH DIGIT ONE}23",
]
SAMPLES += [
    "don't DON'T we'll",
    "مرحبا 한국어 ünïcödé ÀÉ",
    "a<|end|>b",
    " leading and trailing  ",
    "",
    "\r\n \r\n",
    "/a//x",
]


@pytest.mark.oracle
@pytest.mark.parametrize("split_by", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_tokenizers_give_the_ids_of_transformers(split_by: str, tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights, metadata=trained() | {"tokenizer.ggml.pre": split_by})
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(file))[:2])
    ours = nnxmoe.Tokenizer.from_pretrained(file)
    for text in [*SAMPLES, "abc abc é<tool>bc</s>", "  a  b", "ab\nc"]:
        assert ours.encode(text, False) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "Q4_0"),
        ("llama", "Q5_0"),
        ("qwen2", "Q8_0"),
        ("qwen3", "Q5_1"),
        ("qwen3_moe", "Q8_0"),
        ("llama", "Q4_1"),
    ],
)
def test_logits_are_those_of_transformers_reading_the_file(kind: str, name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    # What transformers reads of no file: biases, and the widths of Qwen3's heads and experts.
    unread = {"attention_bias": False, "moe_intermediate_size": 768, "head_dim": 128 if kind == "qwen3" else 16}
    fields, weights, _ = case(kind, **_WIDE | unread, tie_word_embeddings=False)
    file = write(tmp_path / "model.gguf", fields, weights, quantised(name), metadata=trained())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = random_tokens(2, 11, fields["vocab_size"])
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = nnxmoe.from_pretrained(file)(tokens).logits
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


# Malformed files


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    fields = TINY["llama"] | _CHANGES["llama"]
    file = write(tmp_path_factory.mktemp("good") / "model.gguf", fields, tiny_weights(fields), metadata=sentencepiece())
    return file.read_bytes()


def patch(at: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    """Replace bytes at an offset."""
    packed = struct.pack("<" + form, *values)
    return lambda data: data[:at] + packed + data[at + len(packed) :]


def after(text: str, form: str, *values: Any, skip: int = 0) -> Callable[[bytes], bytes]:
    """Replace the bytes after the first occurrence of a text."""
    return lambda data: patch(data.index(text.encode()) + len(text) + skip, form, *values)(data)


def swap(old: str, new: str) -> Callable[[bytes], bytes]:
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode())


# A string's length is before it; after a key come its type (4 bytes) and its value; after a tensor's name its rank (4),
# its sizes (8 each), its type (4) and its offset (8).
MALFORMED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an empty file": (lambda _: b"", "takes 4 bytes, but the header can have at most 0 more"),
    "another format": (lambda data: b"PK\3\4" + data[4:], "is not a GGUF file"),
    "only the magic number": (lambda data: data[:4], "the version at byte 4"),
    "version 1": (patch(4, "I", 1), "version 1 is not supported, only 2 and 3"),
    "a later version": (patch(4, "I", 9), "version 9 is not supported"),
    "big-endian": (patch(4, "I", 3 << 24), "it is big-endian"),
    "2**60 tensors": (patch(8, "Q", 1 << 60), "tensors and"),
    "2**60 fields": (patch(16, "Q", 1 << 60), "fields; at most"),
    "one field more": (lambda data: patch(16, "Q", struct.unpack("<Q", data[16:24])[0] + 1)(data), "download or write"),
    "one tensor more": (lambda data: patch(8, "Q", struct.unpack("<Q", data[8:16])[0] + 1)(data), "download or write"),
    "a key of 2**62 bytes": (patch(24, "Q", 1 << 62), "a key has a length of 4611686018427387904"),
    "a text of 2**40 bytes": (
        after("general.architecture", "Q", 1 << 40, skip=4),
        "general.architecture' has a length",
    ),
    "a text beyond the file": (after("general.architecture", "Q", 1 << 27, skip=4), "header can have"),
    "an unknown type": (after("general.architecture", "I", 77), "has the unknown type 77"),
    "an array of 2**50": (after("tokenizer.ggml.tokens", "Q", 1 << 50, skip=8), "is an array of 1125899906842624"),
    "numbers beyond the file": (after("tokenizer.ggml.scores", "Q", 1 << 50, skip=8), "header can have"),
    "an array of arrays": (after("tokenizer.ggml.tokens", "I", 9, skip=4), "unknown type 9 in an array"),
    "a key twice": (swap("llama.rope.dimension_count", "llama.attention.key_length"), "occurs twice"),
    "a missing key": (swap("llama.embedding_length", "llama.embedding_lengtx"), "llama.embedding_length is missing"),
    "no architecture": (swap("general.architecture", "general.architecturx"), "general.architecture must be a string"),
    "an unknown architecture": (swap("llama", "clipx"), "the architecture 'clipx' is not supported in GGUF files"),
    "a rank of 9": (after("blk.0.attn_q.weight", "I", 9), "has 9 dimensions, more than 4"),
    "2**61 columns": (after("blk.0.attn_q.weight", "Q", 1 << 61, skip=4), "is too large"),
    "2**40 columns": (after("blk.0.attn_q.weight", "Q", 1 << 40, skip=4), "ends beyond the file's"),
    "other columns": (after("blk.0.attn_q.weight", "Q", 12, skip=4), "starts at"),
    "an unknown tensor type": (after("blk.0.attn_q.weight", "I", 200, skip=20), "has the type 200"),
    "a removed tensor type": (after("blk.0.attn_q.weight", "I", 4, skip=20), "has the type 4"),
    "rows that are no blocks": (
        after("blk.0.attn_q.weight", "I", 2, skip=20),
        "cannot be divided into Q4_0 blocks of 32",
    ),
    "an offset elsewhere": (after("blk.0.attn_q.weight", "Q", 64, skip=24), "starts at 64 instead of"),
    "an offset of 2**63": (after("blk.0.attn_q.weight", "Q", 1 << 63, skip=24), "starts at"),
    "a tensor twice": (swap("blk.0.attn_k.weight", "blk.0.attn_q.weight"), "occurs twice"),
    "a missing tensor": (swap("blk.0.attn_k.weight", "blk.0.attn_z.weight"), "model.layers.0.self_attn.k_proj.weight"),
    "no embedding": (swap("token_embd.weight", "token_embx.weight"), "token_embd.weight is missing"),
    "no layers": (after("llama.block_count", "I", 0, skip=4), "num_hidden_layers"),
    "2**31 layers": (after("llama.block_count", "I", 1 << 31, skip=4), "num_hidden_layers"),
    "zero heads": (after("llama.attention.head_count", "I", 0, skip=4), "num_attention_heads"),
    "more heads": (after("llama.attention.head_count", "I", 8, skip=4), "self_attn.q_proj.weight"),
    "without its end": (lambda data: data[:-40], "ends beyond the file's"),
    "half of it": (lambda data: data[: len(data) // 2], "ends beyond the file's"),
    "cut in the header": (lambda data: data[:2000], "download or write it again"),
    "a pointer of Git LFS": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_in_words(name: str, good: bytes, tmp_path: Path) -> None:
    change, says = MALFORMED[name]
    data = change(good)
    assert data != good
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as raised:
            nnxmoe.from_pretrained(file, strategy=ORACLE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert says in str(raised.value) and "model.gguf" in str(raised.value), raised.value
    assert peak < 64 << 20, peak


def test_what_changes_numbers_and_is_not_built_is_refused(tmp_path: Path) -> None:
    fields, weights, _ = case("llama")
    scaled = write(tmp_path / "scaled.gguf", fields, weights, metadata={"logit_scale": 0.5})
    with pytest.raises(CheckpointError, match=r"llama.logit_scale is 0.5, which is not supported for llama"):
        nnxmoe.from_pretrained(scaled)
    unread = write(tmp_path / "unread.gguf", fields, weights, metadata={"some.new.key": 3})
    report = nnxmoe.from_pretrained(unread).load_report
    assert report is not None and report.notes == ("metadata without effect: some.new.key",)
    odd = write(tmp_path / "odd.gguf", fields, weights, metadata={"general.alignment": 3})
    with pytest.raises(CheckpointError, match=r"general.alignment must be a power of two, got 3"):
        nnxmoe.from_pretrained(odd)
    layers = write(tmp_path / "layers.gguf", fields, weights, metadata={"attention.head_count": [4, 2]})
    with pytest.raises(CheckpointError, match=r"llama.attention.head_count differs between layers.*\(4, 2\)"):
        nnxmoe.from_pretrained(layers)
    with pytest.raises(CheckpointError, match=r"no such folder"):
        Checkpoint.open(tmp_path / "missing.gguf")


_SCALING = "rope.scaling."
_YARN: dict[str, Any] = {f"{_SCALING}type": "yarn", f"{_SCALING}factor": 4.0, f"{_SCALING}original_context_length": 16}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({f"{_SCALING}type": "linear", f"{_SCALING}factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({f"{_SCALING}factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0, f"{_SCALING}factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({f"{_SCALING}type": "none", f"{_SCALING}factor": 4.0}, None),
        ({f"{_SCALING}type": "yarn"}, None),
        (_YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
        (_YARN | {f"{_SCALING}original_context_length": 0}, {"rope_type": "yarn", "factor": 4.0}),
        (_YARN | {f"{_SCALING}finetuned": True, f"{_SCALING}yarn_ext_factor": 1.0}, {"rope_type": "yarn"}),
        (_YARN | {f"{_SCALING}attn_factor": 1.5}, {"attention_factor": 1.5 * (1 + 0.1 * math.log(4))}),
        (_YARN | {f"{_SCALING}factor": 1.0, f"{_SCALING}attn_factor": 1.5}, {"attention_factor": 1.5}),
        (_YARN | {f"{_SCALING}attn_factor": 1.5, f"{_SCALING}yarn_ext_factor": 0.5}, "yarn_ext_factor 0.5"),
        (_YARN | {f"{_SCALING}yarn_attn_factor": 1.5}, "yarn_attn_factor 1.5"),
        (_YARN | {f"{_SCALING}yarn_log_multiplier": 0.1}, "yarn_log_multiplier 0.1"),
        ({f"{_SCALING}attn_factor": 1.5}, "attn_factor 1.5 with type linear"),
        ({f"{_SCALING}alpha": 1000.0}, "alpha 1000.0"),
        ({f"{_SCALING}type": "longrope", f"{_SCALING}factor": 4.0}, "type 'longrope'"),
        ({f"{_SCALING}factor": -1.0}, "factor must be a positive number, got -1.0"),
    ],
)
def test_rope_scaling_in_every_spelling(
    metadata: dict[str, Any], expected: dict[str, Any] | str | None, tmp_path: Path
) -> None:
    """Logits of these, where they are not refused, agree with llama.cpp's to 4e-3, the noise of its float16 cache."""
    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights, metadata=metadata)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=rf"llama\.rope\.scaling\.{expected}"):
            config_fields(GGUF.open(file))
        return
    found, notes = config_fields(GGUF.open(file))
    assert not notes and config_from_hf(found)
    if expected is None:
        assert "rope_scaling" not in found
    else:
        assert found["rope_scaling"] | expected == found["rope_scaling"]


@pytest.mark.parametrize(
    ("kind", "absent", "expected"),
    [
        ("gpt_oss", "rope.freq_base", {"rope_theta": 10_000.0}),
        ("gpt_oss", "rope.scaling.factor", {"rope_scaling": {"rope_type": "default"}}),
        ("mixtral", "attention.head_count_kv", {"num_key_value_heads": 4}),
        ("qwen3_moe", "attention.head_count_kv", {"num_key_value_heads": 4}),
        ("qwen3_moe", "expert_weights_norm", {"norm_topk_prob": True}),
        ("qwen3_moe", "feed_forward_length", {"moe_intermediate_size": 12}),
        ("gpt_oss", "feed_forward_length", {"intermediate_size": 28}),
        ("mixtral", "feed_forward_length", "feed_forward_length is missing"),
        ("glm4_moe", "leading_dense_block_count", {"first_k_dense_replace": 0}),
        ("glm4_moe", "expert_weights_norm", {"norm_topk_prob": False}),
        ("glm4_moe", "expert_weights_scale", {"routed_scaling_factor": 1.0}),
        ("glm4_moe", "expert_gating_func", {}),
        ("deepseek_v3", "leading_dense_block_count", {"first_k_dense_replace": 0}),
        ("deepseek_v3", "expert_group_count", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", "expert_gating_func", "expert_gating_func 1 with exp_probs_b.bias is not supported"),
        ("deepseek_v3", "attention.kv_lora_rank", "attention.kv_lora_rank is missing"),
        ("qwen3_moe", "expert_used_count", "expert_used_count is missing"),
        ("gpt_oss", "attention.sliding_window", "attention.sliding_window is missing"),
        ("llama", "attention.layer_norm_rms_epsilon", "attention.layer_norm_rms_epsilon is missing"),
    ],
)
def test_absent_keys_have_the_values_of_llama_cpp(
    kind: str, absent: str, expected: dict[str, Any] | str, tmp_path: Path
) -> None:
    fields, weights, _ = case(kind)
    model = GGUF.open(write(tmp_path / "model.gguf", fields, weights))
    name = model.text("general.architecture")
    model = dataclasses.replace(model, fields={k: v for k, v in model.fields.items() if k != f"{name}.{absent}"})
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            config_fields(model)
    else:
        found, notes = config_fields(model)
        assert found | expected == found and not notes


@pytest.mark.parametrize(
    ("kind", "metadata", "refused"),
    [
        ("llama", {"final_logit_softcapping": 5.0}, True),
        ("llama", {"attention.causal": False}, True),
        ("llama", {"attention.causal": True, "logit_scale": 1.0, "residual_scale": 0.0}, False),
        ("llama", {"attention.value_length": 10}, True),
        ("qwen2", {"rope.dimension_count": 2}, True),
        ("llama", {"rope.freq_base_swa": 500.0}, True),
        ("mixtral", {"expert_weights_scale": 3.0}, True),
        ("mixtral", {"expert_weights_scale": 0.0, "expert_gating_func": 1}, False),
        ("qwen3_moe", {"expert_gating_func": 2}, True),
        ("glm4_moe", {"expert_gating_func": 1}, True),
        ("glm4_moe", {"expert_weights_scale": 0.0, "expert_group_count": 0}, False),
        ("gpt_oss", {"attention.sliding_window_pattern": 2}, False),
        ("gpt_oss", {"attention.sliding_window_pattern": 3}, True),
        ("llama", {"swiglu_clamp_exp": [0.0, 7.0]}, True),
        ("llama", {"moe_every_n_layers": 2}, True),
        ("deepseek_v3", {f"{_SCALING}type": "linear", f"{_SCALING}factor": 4.0}, True),
        ("deepseek_v3", _YARN, True),
        ("deepseek_v3", {f"{_SCALING}attn_factor": 1.3, **_YARN, f"{_SCALING}yarn_log_multiplier": 0.1}, True),
        ("deepseek_v3", _YARN | {f"{_SCALING}yarn_log_multiplier": 0.1}, False),
    ],
)
def test_keys_with_an_effect_are_never_without_effect(
    kind: str, metadata: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    fields, weights, _ = case(kind)
    model = GGUF.open(write(tmp_path / "model.gguf", fields, weights, metadata=metadata))
    if refused:
        with pytest.raises(CheckpointError, match=f"{next(iter(metadata)).rpartition('.')[2]}.* not supported"):
            config_fields(model)
    else:
        found, _ = config_fields(model)
        assert found.get("routed_scaling_factor", 1.0) and found.get("n_group", 1)


def test_arrays_are_lazy(tmp_path: Path) -> None:
    """Opening reads the header alone."""
    fields, weights, _ = case("llama")
    file = write(tmp_path / "model.gguf", fields, weights)
    with Checkpoint.open(file) as checkpoint:
        assert checkpoint.bytes_read == 0 and checkpoint.tensors.keys() == GGUF.open(file).tensors.keys()
        assert isinstance(_array(GGUF.open(file).tensors["output.weight"], checkpoint), LazyArray)
