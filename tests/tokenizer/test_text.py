"""The tokenizer, streaming decoding, and untrusted chat templates."""

import dataclasses
import json
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

import nnxmoe
from nnxmoe.generation import decode
from nnxmoe.generation.complete import encode_prompt
from nnxmoe.tokenizer.chat_template import render_chat_template
from nnxmoe.tokenizer.tokenizer import TextStream, Tokenizer, TokenizerError

CASES = sorted((Path(__file__).parents[1] / "data" / "hf").glob("*/case.json"))
MODEL = Path(__file__).parents[1] / "data" / "hf" / "llama_basic" / "model"
HI = [{"role": "user", "content": "hi"}]


def render(template: str, **variables: Any) -> str:
    return render_chat_template(template, {"messages": HI, **variables}).text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(MODEL / name, tmp_path / name)
    return tmp_path


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


# The reference cases


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_tokenizer_matches_reference_cases(case: Path) -> None:
    expected = json.loads(case.read_text())["tokenizer"]
    tokenizer = Tokenizer.from_pretrained(case.parent / "model")
    for text in expected["texts"]:
        assert tokenizer.encode(text["text"]) == text["ids"]
        assert tokenizer.decode(text["ids"]) == text["decoded"]
    chat = expected["chat"]
    before = json.dumps(chat["messages"])
    assert tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True) == chat["rendered"]
    assert tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, tokenize=True) == chat["ids"]
    assert json.dumps(chat["messages"]) == before


def test_number_of_reference_cases() -> None:
    assert len(CASES) == 6


def test_tokenizer_attributes() -> None:
    tokenizer = Tokenizer.from_pretrained(str(MODEL))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (293, 294, 295)
    assert tokenizer.unk_token is None
    assert tokenizer.vocab_size == 300
    assert tokenizer.chat_template == (MODEL / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: iter_jax(ids)]
)
def test_decode_takes_arrays(make: Any) -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode("naïve 你好<|eos|>")
    assert tokenizer.decode(make(ids)) == "naïve 你好<|eos|>"
    assert tokenizer.decode(make(ids), skip_special_tokens=True) == "naïve 你好"


def iter_jax(ids: list[int]) -> Any:
    return pytest.importorskip("jax.numpy").asarray(ids)


def test_decode_edge_cases() -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode(np.int32(39)) == "H"
    assert tokenizer.decode([39, 5000]) == "H"
    for bad in ([[1, 2]], [-1], [2**40], [1.5], ["a"], [True]):
        with pytest.raises(TokenizerError):
            tokenizer.decode(bad)


def test_encode_rejects_invalid_text() -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    with pytest.raises(TokenizerError, match="lone surrogates"):
        tokenizer.encode("\ud800")
    with pytest.raises(TypeError, match="str"):
        tokenizer.encode(5)  # type: ignore[arg-type]


def test_only_the_post_processor_adds_special_tokens(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", add_bos_token=True)
    assert Tokenizer.from_pretrained(folder).encode("Hi") == [39, 72]
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [293], "tokens": ["<|bos|>"]}},
    }
    change_json(folder / "tokenizer.json", post_processor=template)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.encode("Hi") == [293, 39, 72]
    assert tokenizer.encode("Hi", add_special_tokens=False) == [39, 72]
    assert tokenizer.apply_chat_template(HI, tokenize=True)[:2] == [293, 296]  # no second BOS


def test_truncation_and_padding_are_disabled(folder: Path) -> None:
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 295, "pad_type_id": 0, "pad_token": "<|pad|>"}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    change_json(folder / "tokenizer.json", padding=padding, truncation=truncation)
    assert Tokenizer.from_pretrained(folder).encode("Hi") == [39, 72]


# Files


def test_special_tokens_as_objects_and_from_the_map(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    change_json(config, eos_token={"content": "<|end|>", "lstrip": False}, pad_token=None)
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<|eos|>"}}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|bos|>", "<|end|>", "<|eos|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (299, None, None)
    assert tokenizer.apply_chat_template(HI) == "<|bos|><|end|><|eos|>"
    assert tokenizer.apply_chat_template(HI, bos_token="B") == "B<|end|><|eos|>"
    change_json(config, added_tokens_decoder={})  # then transformers does not read the map
    assert Tokenizer.from_pretrained(folder).unk_token is None


NEW = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False, "special": True}
DECLARED: dict[str, dict[str, Any]] = {  # file -> fields
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {"300": NEW, "301": NEW | {"content": "more"}}}},
    "flags": {"tokenizer_config.json": {"added_tokens_decoder": {"299": NEW | {"content": "<|end|>"}}}},
    "named": {"tokenizer_config.json": {"sep_token": "<new>", "pad_token": "<pad>"}},
    "object": {"tokenizer_config.json": {"pad_token": NEW | {"__type": "AddedToken"}}},
    "in the vocabulary": {"tokenizer_config.json": {"pad_token": "a"}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<new>", "<|end|>"]}},
    "older extra": {"tokenizer_config.json": {"additional_special_tokens": ["<new>"]}},
    "extra by name": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<new>"}}},
    "own name": {"tokenizer_config.json": {"image_token": "<new>"}},
    "map": {"special_tokens_map.json": {"pad_token": NEW, "extra_special_tokens": ["more"]}},
    "added": {"added_tokens.json": {"<new>": 300, "more": 301}, "tokenizer_config.json": {"pad_token": "<new>"}},
}


def declare(folder: Path, name: str) -> Path:
    for file, fields in DECLARED[name].items():
        change_json(folder / file, **fields)
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("name", DECLARED)
def test_tokens_declared_outside_tokenizer_json_against_transformers(folder: Path, name: str) -> None:
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(declare(folder, name))
    ours = Tokenizer.from_pretrained(folder)
    assert "PreTrained" in type(loaded).__name__ or "Backend" in type(loaded).__name__
    for text in ("a <new> b<pad>", " more<new>moreover", "a <|end|> cat"):
        assert ours.encode(text) == loaded.encode(text), text
        for skip in (False, True):
            ids = ours.encode(text)
            assert ours.decode(ids, skip_special_tokens=skip) == loaded.decode(ids, skip_special_tokens=skip)
    assert (ours.pad_token, ours.pad_token_id) == (loaded.pad_token, loaded.pad_token_id)


def test_tokens_declared_with_other_ids_are_refused(folder: Path) -> None:
    change_json(folder / "tokenizer_config.json", added_tokens_decoder={"305": NEW})
    with pytest.raises(TokenizerError, match=r"'<new>' is declared with the id 305, but the vocabulary assigns 300"):
        Tokenizer.from_pretrained(folder)
    for bad in ([], {"x": NEW}, {"300": 5}, {"300": {"content": 5}}):
        change_json(folder / "tokenizer_config.json", added_tokens_decoder=bad)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            Tokenizer.from_pretrained(folder)
    change_json(folder / "tokenizer_config.json", added_tokens_decoder=None)
    (folder / "added_tokens.json").write_text('{"<new>": "300"}')
    with pytest.raises(TokenizerError, match=r"added_tokens\.json: the id of '<new>' is '300'"):
        Tokenizer.from_pretrained(folder)


MERGED = {
    "GPT2Tokenizer": {"tokenizer_class": "GPT2Tokenizer"},
    "GPT2 with ends": {"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True, "bos_token": "<s>"},
    "Qwen2Tokenizer": {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": ["<|im_end|>"]},
    "with a space": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
}


def merges_folder(folder: Path, **config: Any) -> Path:
    """A folder with vocab.json and merges.txt only."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "Ġ w", "1 2"]
    vocab = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.oracle
@pytest.mark.parametrize("name", MERGED)
def test_vocab_and_merges_against_transformers(tmp_path: Path, name: str) -> None:
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(merges_folder(tmp_path, **MERGED[name]))
    ours = Tokenizer.from_pretrained(tmp_path)
    for text in ("hello world", "  12 123\n\n we'll ½é e\u0301", "x<|endoftext|>y<|im_end|><s>", "🦊"):
        assert ours.encode(text) == loaded.encode(text)
        assert ours.decode(ours.encode(text)) == loaded.decode(loaded.encode(text))
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=True) == loaded.decode(ids, skip_special_tokens=True)
    named = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [getattr(ours, n) for n in named] == [getattr(loaded, n) for n in named]


def test_vocab_and_merges(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(merges_folder(tmp_path, tokenizer_class="GPT2Tokenizer"))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello" and len(tokenizer.encode("hello")) == 2
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == 261
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(MODEL / name, tmp_path / "model" / name)
    model = nnxmoe.from_pretrained(merges_folder(tmp_path / "model", tokenizer_class="GPT2Tokenizer").resolve())
    assert next(nnxmoe.complete(model, ["hello"], max_new_tokens=1)).prompt_ids == tuple(tokenizer.encode("hello"))
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    with pytest.raises(TokenizerError, match=r"tokenizer_class is 'LlamaTokenizer'.*only GPT2Tokenizer and Qwen2"):
        Tokenizer.from_pretrained(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", tokenizer_class=None)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert Tokenizer.from_pretrained(tmp_path).encode("123") == [16, 17, 18]
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json and merges\.txt are not a byte-level BPE vocabulary"):
        Tokenizer.from_pretrained(tmp_path)


def test_only_tokenizer_json(tmp_path: Path) -> None:
    shutil.copyfile(MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("Hi") == [39, 72] and tokenizer.bos_token is None and tokenizer.chat_template is None
    with pytest.raises(TokenizerError, match=r"no chat template.*base model"):
        tokenizer.apply_chat_template(HI)


def test_chat_template_precedence(folder: Path) -> None:
    config, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    (folder / "chat_template.json").write_text('{"chat_template": "old"}')
    change_json(config, chat_template="config")
    assert Tokenizer.from_pretrained(folder).chat_template == own.read_text()
    own.unlink()
    assert Tokenizer.from_pretrained(folder).apply_chat_template(HI) == "config"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    change_json(config, chat_template=named)
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == tokenizer.apply_chat_template(HI) == "plain"
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}]) == "f"
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}], chat_template="default") == "plain"
    with pytest.raises(TokenizerError, match=r"named 'rag'.*'default', 'tool_use'"):
        tokenizer.apply_chat_template(HI, chat_template="rag")
    change_json(config, chat_template=None)
    assert Tokenizer.from_pretrained(folder).chat_template == "old"
    for bad in (5, [5], [{"name": "default"}]):
        change_json(config, chat_template=bad)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: 'chat_template' must be"):
            Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", r"tokenizer\.json is not valid JSON"),
        ("tokenizer.json", "{", r"tokenizer\.json is not valid JSON"),
        ("tokenizer.json", "[]", r"tokenizer\.json must contain a JSON object"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not in a format that 'tokenizers'"),
        ("tokenizer.json", '{"model": {"type": "Nope"}}', r"tokenizer\.json: unknown tokenizer model 'Nope'"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json is not valid JSON"),
        ("tokenizer_config.json", "no", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "\xff", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "3", r"tokenizer_config\.json must contain a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', r"tokenizer_config\.json: bos_token is 3"),
        ("chat_template.jinja", "\xff", r"chat_template\.jinja is not UTF-8"),
    ],
)
def test_malformed_files(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(folder)


def test_tokenizers_panics_become_errors(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["single"] = [{"SpecialToken": {"id": "X", "type_id": 0}}]
    change_json(folder / "tokenizer.json", post_processor=template)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot encode"):
        Tokenizer.from_pretrained(folder).encode("Hi")
    change_json(folder / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not in a format"):
        Tokenizer.from_pretrained(folder)


INSTEAD = {
    "tokenizer.model": "tokenizer.model is in SentencePiece's format.*save it with transformers",
    "tekken.json": "tekken.json is in mistral-common's format, which is not supported$",
    "tiktoken.model": "tiktoken.model is in tiktoken's format, which is not supported$",
    "qwen.tiktoken": "qwen.tiktoken is in tiktoken's format, which is not supported$",
    "vocab.json": "vocab.json needs merges.txt in the same folder",
    "merges.txt": "merges.txt needs vocab.json in the same folder",
    "README.md": "no tokenizer files",
}


def test_missing_tokenizer_json_names_what_is_there(tmp_path: Path) -> None:
    for name, message in INSTEAD.items():
        (tmp_path / name).write_text("{}")
        with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing\. .*" + message):
            Tokenizer.from_pretrained(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # Llama 3's
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is in tiktoken's format"):
        Tokenizer.from_pretrained(tmp_path)


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.from_pretrained(tmp_path / "tokenizer.model")
    with pytest.raises(TokenizerError, match="no such folder"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TokenizerError, match=r"nobody/nothing: .*not in the local cache"):
        Tokenizer.from_pretrained("nobody/nothing", local_files_only=True)


def test_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(MODEL)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert Tokenizer.from_pretrained("owner/name", revision="v1", local_files_only=True).encode("Hi") == [39, 72]
    assert (asked["name"], asked["revision"], asked["local_files_only"]) == ("owner/name", "v1", True)
    assert {"tokenizer.json", "additional_chat_templates/*.jinja"} <= set(asked["allow_patterns"])
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_named_templates_in_files(folder: Path) -> None:
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("TOOLS {{ tools | length }}\r\n")
    change_json(folder / "tokenizer_config.json", chat_template="not read, since there are files")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(HI, tools=[{"name": "f"}]) == "TOOLS 1"
    assert tokenizer.chat_template == (folder / "chat_template.jinja").read_text()
    assert tokenizer.apply_chat_template(HI, chat_template="{{ messages[0].content }}!") == "hi!"
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match=r"named 'default'.*one of \['tool_use'\]"):
        Tokenizer.from_pretrained(folder).apply_chat_template(HI)
    (more / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"tool_use\.jinja is not UTF-8"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.oracle
def test_named_templates_against_transformers(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(name + " {{ tools | length }}")
    loaded, ours = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder), None
    ours = Tokenizer.from_pretrained(folder)
    for given in ({}, {"tools": TOOLS}, {"tools": []}, {"tools": TOOLS, "chat_template": "rag"}):
        assert ours.apply_chat_template(HI, **given) == loaded.apply_chat_template(HI, tokenize=False, **given)


def test_saving_copies_every_file_of_the_tokenizer_and_code(tmp_path: Path) -> None:
    source, more = tmp_path / "source", "additional_chat_templates/tool_use.jinja"
    shutil.copytree(MODEL, source)
    (source / "additional_chat_templates").mkdir()
    names = (
        more,
        "tekken.json",
        "tokenizer.model.v3",
        "qwen.tiktoken",
        "vocab.json",
        "added_tokens.json",
        "modeling_x.py",
    )
    for name in names:
        (source / name).write_text(name)
    nnxmoe.save_pretrained(nnxmoe.from_pretrained(source), tmp_path / "saved")
    for name in names:
        assert (tmp_path / "saved" / name).read_text() == name


# Calling a tokenizer


def test_calling_gives_ids_and_mask(folder: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(folder)
    assert tokenizer("Hi") == {"input_ids": [39, 72], "attention_mask": [1, 1]}
    assert tokenizer(["Hi", "H"]) == {"input_ids": [[39, 72], [39]], "attention_mask": [[1, 1], [1]]}
    made = tokenizer(["Hi", "H"], padding=True, return_tensors="np")
    assert made["input_ids"].tolist() == [[39, 72], [39, 295]] and made["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert tokenizer("Hi", return_tensors="jax")["input_ids"].shape == (1, 2)
    cut = tokenizer("Hi", padding="max_length", max_length=3, truncation=True)
    assert cut == {"input_ids": [39, 72, 295], "attention_mask": [1, 1, 0]}
    model = nnxmoe.from_pretrained(MODEL)
    assert model(**tokenizer("Hi", return_tensors="np")).logits.shape[:2] == (1, 2)
    for bad in ({"return_tensors": "pt"}, {"padding": "left"}, {"truncation": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            tokenizer("Hi", **bad)
    with pytest.raises(ValueError, match="pass padding=True"):
        tokenizer(["Hi", "H"], return_tensors="np")


# Decoding


def test_special_tokens_that_the_normalizer_changes_are_skipped() -> None:
    """As in Llama 2's tokenizer.json with "normalized": true: `tokenizers` 0.23 keeps them when it skips."""
    tokenizer = sentencepiece_like(llama2_decoder())
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    backend.normalizer = tokenizers.normalizers.Sequence(steps)
    backend.add_tokens([tokenizers.AddedToken("</s>", normalized=True, special=True)])
    tokenizer = Tokenizer(backend, {}, {}, "made here")
    assert tokenizer.decode([1, 3, 4, 1]) == "</s> Hello fox </s>"
    assert tokenizer.decode([1, 3, 4, 1], skip_special_tokens=True) == "Hello fox"
    for ids in ([1, 3, 1, 4], [3, 1, 4, 1]):
        pieces, rest = stream_all(tokenizer, ids)
        assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=True)


def test_special_tokens_of_llama_match_before_the_normalizer(tmp_path: Path) -> None:
    """So that a second "</s>" in a text is not encoded as letters."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece_like(llama2_decoder()).backend.to_str())
    backend.normalizer = tokenizers.normalizers.Prepend("▁")
    backend.add_tokens([tokenizers.AddedToken("</s>", normalized=True, special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    for kind, ends in (("LlamaTokenizer", 2), ("PreTrainedTokenizerFast", 1)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        assert Tokenizer.from_pretrained(tmp_path).encode("</s>be</s>a").count(1) == ends


# Streaming


def stream_all(tokenizer: Tokenizer, ids: list[int], **options: Any) -> tuple[list[str], str]:
    stream = TextStream(tokenizer, **options)
    return [stream.put(i) for i in ids], stream.end()


def sentencepiece_like(decoder: Any) -> Tokenizer:
    letters = ["<unk>", "</s>", "▁", "▁Hello", "▁fox", "!", *"abefhilo", "▁▁"]
    vocab = {piece: i for i, piece in enumerate([*letters, *(f"<0x{byte:02X}>" for byte in range(256))])}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {}, {}, "made here")


def llama2_decoder() -> Any:
    parts = tokenizers.decoders
    steps = [parts.Replace("▁", " "), parts.ByteFallback(), parts.Fuse(), parts.Strip(" ", 1, 0)]
    return parts.Sequence(steps)


@pytest.mark.parametrize("text", ["The quick brown fox", " a  b\n\n c ", "naïve 你好 🦊🦊🏳️‍🌈!", "é", "", "🦊" * 50])
def test_stream_byte_level(text: str) -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    pieces, rest = stream_all(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text and rest == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_of_arbitrary_bytes() -> None:
    """The pieces add up to the text of all ids, also for short runs of invalid UTF-8."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    choose = random.Random(0)
    for _ in range(300):
        ids = [choose.choice([choose.randrange(300), choose.randrange(94, 256)]) for _ in range(40)]
        for skip in (False, True):
            pieces, rest = stream_all(tokenizer, ids, skip_special_tokens=skip)
            assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


def test_stream_sentencepiece() -> None:
    choose = random.Random(1)
    for decoder in (llama2_decoder(), tokenizers.decoders.Metaspace()):
        tokenizer = sentencepiece_like(decoder)
        bytes_of_a_fox = [tokenizer.backend.get_vocab()[f"<0x{byte:02X}>"] for byte in "🦊".encode()]
        chunks = [[i] for i in range(15)] + ([bytes_of_a_fox] if decoder.__class__.__name__ == "Sequence" else [])
        for _ in range(200):
            ids = [i for _ in range(12) for i in choose.choice(chunks)]
            for skip in (False, True):
                pieces, rest = stream_all(tokenizer, ids, skip_special_tokens=skip)
                assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)
                assert not any("\ufffd" in piece for piece in pieces)


def test_stream_keeps_the_space_after_the_prompt() -> None:
    tokenizer = sentencepiece_like(llama2_decoder())
    hello, fox = 3, 4
    assert stream_all(tokenizer, [hello, fox])[0] == ["Hello", " fox"]
    assert stream_all(tokenizer, [fox], context=[1, 2, hello])[0] == [" fox"]


def test_stream_continues_a_prompt_that_ends_in_special_tokens() -> None:
    """Prompt and pieces add up to the text of all ids; a skipped token is not followed by a space."""
    tokenizer = sentencepiece_like(llama2_decoder())
    end, hello, fox = 1, 3, 4
    for prompt in ([hello], [hello, *[end] * 9], [end], [fox, end, hello, end]):
        pieces, rest = stream_all(tokenizer, [fox, hello], context=prompt)
        text = tokenizer.decode(prompt, skip_special_tokens=True) + "".join(pieces) + rest
        assert text == tokenizer.decode([*prompt, fox, hello], skip_special_tokens=True)


@pytest.mark.wrong_types
def test_stream_of_a_model_continues_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = sentencepiece_like(llama2_decoder())
    hello, fox = 3, 4
    request = SimpleNamespace(done=False, finish="length")

    def step() -> list[Any]:
        request.done = True
        return [SimpleNamespace(ids=[fox, hello, fox])]

    running: Any = SimpleNamespace(step=step, dropped=0), [request]
    monkeypatch.setattr(decode, "_requests", lambda *_: running)
    model = object.__new__(nnxmoe.CausalLM)  # the only use of it is patched away
    pieces = list(decode.stream(model, tokenizer, [hello], sampling=nnxmoe.Sampling(0.0), eos_token_id=None))
    assert "Hello" + "".join(pieces) == tokenizer.decode([hello, fox, hello, fox]) == "Hello fox Hello fox"


def test_stream_special_tokens_and_reuse() -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    ids = tokenizer.encode("<|user|>hi<|end|>")
    assert "".join(stream_all(tokenizer, ids)[0]) == "hi"
    assert "".join(stream_all(tokenizer, ids, skip_special_tokens=False)[0]) == "<|user|>hi<|end|>"
    stream = TextStream(tokenizer)
    half = tokenizer.encode("é")[0]
    assert stream.put(np.int32(half)) == "" and stream.end() == "\ufffd" and stream.end() == ""
    assert stream.put(39) == "H" and stream.put(10**6) == ""


def test_stream_decodes_few_tokens_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_pretrained(MODEL)
    decode, lengths = tokenizer.decode_list, []

    def counting(ids: Any, skip: bool = False) -> str:
        lengths.append(len(ids))
        return decode(ids, skip)

    monkeypatch.setattr(tokenizer, "decode_list", counting)
    ids = tokenizer.encode("The quick brown fox 🦊 " * 100)
    stream_all(tokenizer, ids)
    assert sum(lengths) < 10 * len(ids)
    lengths.clear()
    stream_all(tokenizer, [187] * 2000)  # 0xFF never occurs in UTF-8, so the stream must stop waiting
    assert max(lengths) <= 2 * TextStream.LONGEST_WAIT


# Arguments of chat templates


def test_arguments_unused_by_the_template_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = made_with("{% if date is not defined %}{% set date = 'today' %}{% endif %}{{ date }}")
    assert tokenizer.apply_chat_template(HI, date="Monday") == "Monday" and not caplog.text
    assert tokenizer.apply_chat_template(HI, dat="Monday", enable_thinking=False) == "today"
    assert "'dat', so it has no effect: did you mean 'date'?" in caplog.text and "'enable_thinking'" in caplog.text
    caplog.clear()
    tokenizer.apply_chat_template(HI, dat="Monday", add_generation_promt=True)
    assert "'dat'" not in caplog.text and "did you mean 'add_generation_prompt'" in caplog.text
    with pytest.raises(TypeError, match="unexpected argument 'return_tensors'"):
        tokenizer.apply_chat_template(HI, return_tensors="np")


def test_unread_arguments_are_reported_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Clients of a server choose the names, so the set of reported names is bounded."""
    tokenizer = made_with("{{ messages[0].content }}")
    for number in range(150):
        tokenizer.apply_chat_template(HI, **{f"unread_{number}": 1})
    assert caplog.text.count("so it has no effect") == len(tokenizer._warned) == 101


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
BLOCKS = "{% for m in messages %}{% for b in m.content %}{{ b.text }}{% endfor %}<end>{% endfor %}"
THOUGHTS = "{% for m in messages %}<think>{{ m.thinking }}</think>{{ m.content }}<end>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "last", "field", "expected"),
    [
        (PLAIN, {"role": "assistant", "content": "It is "}, True, "<user>hi<end><assistant>It is "),
        (TRIMMED, {"role": "assistant", "content": " It is "}, True, "<user>hi<end><assistant>It is"),
        (BLOCKS, {"content": [{"text": "a"}, {"text": "b"}, {"image": 1}]}, True, "<end>ab"),
        (THOUGHTS, {"reasoning": "well", "content": "x"}, "reasoning", "<think></think>hi<end><think>well"),
    ],
)
def test_continue_final_message(template: str, last: dict[str, Any], field: Any, expected: str) -> None:
    before = json.dumps(last)
    assert made_with(template).apply_chat_template([*HI, last], continue_final_message=field) == expected
    assert json.dumps(last) == before


def test_continue_final_message_errors() -> None:
    with pytest.raises(TokenizerError, match="not both"):
        made_with(PLAIN).apply_chat_template(HI, add_generation_prompt=True, continue_final_message=True)
    for last in ({"role": "assistant"}, {"content": [{"image": 1}]}):
        with pytest.raises(TokenizerError, match="the last message has no text in 'content'"):
            made_with(PLAIN).apply_chat_template([*HI, last], continue_final_message=True)
    for template in ("{{ messages[0].role }}", "{{ messages[0].content | upper }}"):
        with pytest.raises(TokenizerError, match="omits the last message"):
            made_with(template).apply_chat_template(HI, continue_final_message=True)


# Supported templates

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n'+ message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("only single tool-calls!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}"
    "{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}"
    "{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<\uff5cUser\uff5c>' + message['content']}}"
    "{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<\uff5cAssistant\uff5c>' + content + eos_token}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c>'}}{% endif %}"
)
CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}
    {% endif %}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content -}}{% endgeneration -%}
    {% else %}{{ message.content -}}
    {% endif %}
    {{- '<|im_end|>' + '\\n' -}}
    {% if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TALK = [
    {"role": "user", "content": " Hello <b>'you' & me</b> "},
    {"role": "assistant", "content": "<think>hm</think>Hi."},
    {"role": "user", "content": "你好 🦊"},
]
SYSTEM = [{"role": "system", "content": " Be brief. "}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'ü'", "parameters": {"n": 1}}}]
CALLS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2.0}}}]},
    {"role": "tool", "content": {"é": [True, None]}},
]
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
GOOD: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama3": (
        LLAMA3,
        {"messages": SYSTEM + TALK, "date_string": "26 Jul 2024"},
        f"<s>{HEADER.format('system')}Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        f"{HEADER.format('user')}Hello <b>'you' & me</b><|eot_id|>"
        f"{HEADER.format('assistant')}<think>hm</think>Hi.<|eot_id|>"
        f"{HEADER.format('user')}你好 🦊<|eot_id|>{HEADER.format('assistant')}",
    ),
    "llama3_tools": (
        LLAMA3,
        {"messages": CALLS, "tools": TOOLS, "date_string": "x"},
        f"<s>{HEADER.format('system')}Environment: ipython\nToday Date: x\n\n"
        f"{json.dumps(TOOLS[0], indent=4, ensure_ascii=False)}\n\n<|eot_id|>{HEADER.format('user')}2+2?<|eot_id|>"
        f'{HEADER.format("assistant")}{{"name": "add", "parameters": {{"a": 2.0}}}}<|eot_id|>'
        f'{HEADER.format("ipython")}{{"é": [true, null]}}<|eot_id|>{HEADER.format("assistant")}',
    ),
    "mistral": (
        MISTRAL,
        {"messages": TALK},
        "<s>[INST]  Hello <b>'you' & me</b>  [/INST]<think>hm</think>Hi.</s>[INST] 你好 🦊 [/INST]",
    ),
    "deepseek": (
        DEEPSEEK,
        {"messages": SYSTEM + SYSTEM + TALK},
        "<s> Be brief. \n\n Be brief. <\uff5cUser\uff5c> Hello <b>'you' & me</b> "
        "<\uff5cAssistant\uff5c>Hi.</s><\uff5cUser\uff5c>你好 🦊<\uff5cAssistant\uff5c>",
    ),
    "chatml": (
        CHATML,
        {"messages": TALK},
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n Hello <b>'you' & me</b> <|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>Hi.<|im_end|>\n<|im_start|>user\n你好 🦊<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "reasoning": (
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
        {"messages": [{"role": "assistant", "reasoning": "a"}, {"role": "assistant", "thinking": "b"}]},
        "a|a|a;b|b|;",
    ),
    "odds": (
        "{{ nothing }}{{ dict(a=1).a }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}"
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ tools is none }}{{ extra.x }}\r\n{{ add_generation_prompt }}\n",
        {"messages": HI, "extra": {"x": 1}},
        '1{"a":"<é>","b":1}"\\u00e9"True1\nTrue',
    ),
}


def made_with(template: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special, {"default": template}, "/place", "/place/chat_template.jinja")


def test_backend_of_the_caller_keeps_its_settings() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.enable_truncation(8)
    backend.enable_padding(length=16)
    wrapped = Tokenizer(backend, {}, {}, "/place").backend
    assert wrapped.truncation is None and wrapped.padding is None
    assert backend.truncation["max_length"] == 8 and backend.padding["length"] == 16


@pytest.mark.parametrize("name", GOOD)
def test_real_world_templates(name: str) -> None:
    template, given, expected = GOOD[name]
    assert made_with(template).apply_chat_template(**given, add_generation_prompt=True) == expected


@pytest.mark.oracle
@pytest.mark.parametrize("name", GOOD)
def test_real_world_templates_against_transformers(name: str, folder: Path) -> None:
    template, given, expected = GOOD[name]
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    options = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, "tokenize": False}
    messages = given["messages"]
    rest = {key: value for key, value in given.items() if key != "messages"}
    assert loaded.apply_chat_template(messages, chat_template=template, **options, **rest) == expected


def test_strftime_now_is_today() -> None:
    day = time.strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (day, time.strftime("%d %b %Y"))


def test_lone_surrogates_are_kept() -> None:
    assert render("{{ messages[0].content }}", messages=[{"content": "\ud800\u2028\0"}]) == "\ud800\u2028\0"


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], None, [], 5])
def test_invalid_messages(messages: Any) -> None:
    with pytest.raises(TokenizerError, match="messages"):
        made_with("").apply_chat_template(messages)


@dataclasses.dataclass
class Said:
    role: str
    content: Any
    name: str | None = None


class Pydantic:
    """An object like the OpenAI client's messages."""

    def model_dump(self) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


EVERY_FIELD = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ documents }}{{ x }}"
FIELDS: dict[str, Any] = {
    "messages": [
        Said("user", [{"type": "image"}, {"type": "text", "text": "see"}], "bob"),
        Pydantic(),
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": np.int32(3), "data": np.ones(2)},
    ],
    "tools": TOOLS,
    "documents": [{"title": "t", "text": "é"}],
    "x": {"flag": np.bool_(False), "other": object()},
}


def test_messages_of_any_type_reach_the_template_as_plain_values() -> None:
    rendered = made_with(EVERY_FIELD).apply_chat_template(**FIELDS)
    assert rendered.startswith('{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]')
    assert '"content": 3, "data": [1.0, 1.0]' in rendered and rendered.endswith("{'flag': False, 'other': '<object>'}")
    tokenizer = Tokenizer.from_pretrained(MODEL)
    assert encode_prompt([Said("user", "hi")], tokenizer) == encode_prompt(HI, tokenizer)  # of `stream` and `complete`


@pytest.mark.wrong_types
@pytest.mark.wrong_types
def test_tools_are_schemas() -> None:
    for tools in ([len], 5):
        with pytest.raises(TokenizerError, match="tools is"):
            made_with(EVERY_FIELD).apply_chat_template(HI, tools=tools)  # pyright: ignore
    with pytest.raises(TokenizerError, match="chat_template=5: pass a template"):
        made_with(EVERY_FIELD).apply_chat_template(HI, chat_template=5)  # pyright: ignore


@pytest.mark.oracle
def test_fields_of_messages_against_transformers(folder: Path) -> None:
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    (folder / "chat_template.jinja").write_text(EVERY_FIELD)
    given = dict(FIELDS)
    given["messages"] = [*FIELDS["messages"][:2], FIELDS["messages"][2] | {"data": [1.0, 1.0]}]  # no array
    expected = loaded.apply_chat_template(given.pop("messages"), chat_template=EVERY_FIELD, tokenize=False, **given)
    assert Tokenizer.from_pretrained(folder).apply_chat_template(**FIELDS) == expected


# Tool calls in messages

EACH = "{% for m in messages %}<{{ m.role }}>"
EACH_CALL = EACH + "{{ m.content }}{% for c in m.tool_calls or [] %}"
ENDS = "{% endfor %}{% endfor %}"
FIND = '{"days": 3, "to": "Zürich"}'
# Templates that render the call find(days=3, to="Zürich") of a message without content -> what they render.
CALL_FORMS: dict[str, tuple[str, str]] = {
    "Qwen2.5": (EACH_CALL + '{"name": "{{ c.function.name }}", {{ c.function.arguments | tojson }}' + ENDS, FIND),
    "the whole call": (EACH_CALL + "{{ c.function | tojson }}" + ENDS, f'{{"name": "find", "arguments": {FIND}}}'),
    "GLM": (
        EACH_CALL + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}" + ENDS,
        "to=Zürich;",
    ),
    "Qwen3-Coder": (
        EACH_CALL + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}" + ENDS,
        "3;to=Z",
    ),
    "pythonic": (  # Llama 4: iterating over text would yield letters
        EACH_CALL + "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }};{% endfor %}" + ENDS,
        "days=3;to=Zürich;",
    ),
    "lists": (EACH_CALL + "{{ c.function.arguments.items() | list }}" + ENDS, "[('days', 3), ('to', 'Zürich')]"),
    "DeepSeek": (EACH_CALL + "{{ c.type + c.function.name + c.function.arguments }}" + ENDS, f"functionfind{FIND}"),
    "DeepSeek-R1": (  # renders calls only if content is None
        EACH + "{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.arguments + '' }}{% endfor %}"
        "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}",
        FIND,
    ),
    "flat": (EACH_CALL + "{{ c.name + (c.arguments | tojson) }}" + ENDS, f"find{FIND}"),
    "printed": (EACH_CALL + "{{ c.function.name }}({{ c.function.arguments }})" + ENDS, f"find({FIND})"),
    "content that is text": (
        EACH + "{{ m.content + '' }}{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls }}{% endfor %}",
        FIND,
    ),
    "both": (
        EACH_CALL + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}" + ENDS,
        FIND,
    ),
    "known argument names": (  # a marker argument raises
        EACH_CALL
        + "{% for k, v in c.function.arguments.items() %}{{ {'days': {'n': 'D'}, 'to': {'n': 'T'}}[k].n }}{{ v }}"
        "{% endfor %}" + ENDS,
        "<assistant>D3TZürich",
    ),
}


def calling(call: Any, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", **fields, "tool_calls": [call]}]


@pytest.mark.parametrize("name", CALL_FORMS)
def test_calls_get_the_form_that_the_template_reads(name: str) -> None:
    """In every form that messages may have."""
    template, expected = CALL_FORMS[name]
    tokenizer, rendered = made_with(template), set[str]()
    for arguments in (json.loads(FIND), FIND):
        function = {"name": "find", "arguments": arguments}
        for call in (function, {"function": function}, {"id": "1", "type": "function", "function": function}):
            for content in ({}, {"content": None}, {"content": ""}):
                messages = calling(call, **content)
                before = json.dumps(messages)
                rendered.add(tokenizer.apply_chat_template(messages))
                assert json.dumps(messages) == before
    (text,) = rendered
    assert expected in text and "None" not in text


def test_json_text_is_passed_unchanged_to_templates_that_read_text() -> None:
    text = '{"b":1.50,"a":[ ]}'
    assert text in made_with(CALL_FORMS["DeepSeek"][0]).apply_chat_template(calling({"name": "f", "arguments": text}))


@pytest.mark.parametrize("name", ["Qwen2.5", "DeepSeek"])
def test_calls_without_arguments(name: str) -> None:
    for given in (
        {},
        {"arguments": None},
        {"arguments": ""},
        {"arguments": " "},
        {"arguments": "{}"},
        {"arguments": "null"},
    ):
        text = made_with(CALL_FORMS[name][0]).apply_chat_template(calling({"function": {"name": "now", **given}}))
        assert text.endswith("{}"), given
    for empty in ([], None, "[]", "", " "):
        messages = [*HI, {"role": "assistant", "content": "a", "tool_calls": empty}]
        assert made_with("{{ messages[1].tool_calls is defined }}").apply_chat_template(messages) == "False"


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ({"name": "f", "arguments": '{"a": '}, "the arguments '{\"a\": ' are not a JSON object.*answer truncated"),
        ({"name": "f", "arguments": "[1]"}, r"the arguments '\[1\]' are not a JSON object"),
        ({"name": "f", "arguments": '"{}"'}, "the arguments .* are not a JSON object"),
        ({"name": "f", "arguments": '{"a": NaN}'}, "NaN is not a JSON number"),
        ({"name": "f", "arguments": 3}, "the arguments 3 are not a JSON object"),
        ({"name": "f", "args": {"a": 1}}, "has 'args' but no 'arguments': rename that field"),
        ({"function": {"arguments": "{}"}}, "must be a function call"),
        ({"type": "custom", "custom": {"name": "f", "input": "x"}}, "must be a function call"),
        (3, "is 3: it must be a function call"),
    ],
)
@pytest.mark.parametrize("name", ["Qwen2.5", "DeepSeek"])
def test_unusable_calls_are_named(name: str, call: Any, why: str) -> None:
    with pytest.raises(TokenizerError, match=rf"^messages\[1\]\.tool_calls\[0\].*{why}"):
        made_with(CALL_FORMS[name][0]).apply_chat_template(calling(call))
    for calls in ("{", '{"name": "f"}', 3):
        with pytest.raises(TokenizerError, match=r"^messages\[1\]\.tool_calls"):
            made_with(PLAIN).apply_chat_template([*HI, {"role": "assistant", "tool_calls": calls}])
    former = {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "{}"}}
    with pytest.raises(
        TokenizerError, match=r'^messages\[1\]\.function_call is not supported: write it as "tool_calls"'
    ):
        made_with(CALL_FORMS[name][0]).apply_chat_template([*HI, former])


def test_calls_that_a_template_omits_are_refused() -> None:
    """The template omits all calls, calls in messages with content, or all but the first call of a message."""
    call = {"name": "f", "arguments": {}}
    only_first = EACH + "{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}{% endfor %}"
    two = [*HI, {"role": "assistant", "tool_calls": [call, call]}]
    for template, messages, place in (
        (PLAIN, calling(call), 0),
        (CALL_FORMS["DeepSeek-R1"][0], calling(call, content="See:"), 0),
        (only_first, two, 1),
    ):
        with pytest.raises(TokenizerError, match=rf"omits messages\[1\]\.tool_calls\[{place}\]"):
            made_with(template).apply_chat_template(messages)
    assert "f" in made_with(only_first).apply_chat_template(two[:1] + calling(call)[1:])
    with pytest.raises(TokenizerError, match="refuses this conversation: no"):  # the template's own reason
        made_with("{{ raise_exception('no') }}").apply_chat_template(two)


def test_arguments_as_object_or_text_give_equal_prompts() -> None:
    """In `stream` and `complete`. A last message with a call can be continued."""
    tokenizer = Tokenizer.from_pretrained(MODEL)
    tokenizer.chat_templates = {"default": CALL_FORMS["Qwen2.5"][0]}
    chats = [calling({"name": "f", "arguments": a}, content="Hm") for a in ({"a": 1}, '{"a": 1}')]
    assert encode_prompt(chats[0], tokenizer) == encode_prompt(chats[1], tokenizer)
    texts = [tokenizer.apply_chat_template(chat, continue_final_message=True) for chat in chats]
    assert texts == ["<user>q<assistant>Hm"] * 2


# Faulty and hostile templates

UNSAFE, DEEP = "that is not allowed", "too deeply"
HOSTILE = {
    "{{ ''.__class__.__mro__ }}": UNSAFE,
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}": "undefined|that is not allowed",
    "{{ ''|attr('__class__')|attr('__mro__') }}{{ ().__class__.__base__.__subclasses__() }}": UNSAFE,
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": UNSAFE,
    "{{ lipsum.__globals__['os'].environ }}": UNSAFE,
    "{{ raise_exception.__globals__.sys.modules }}": UNSAFE + "|undefined",
    "{{ namespace(__class__=1) }}": UNSAFE,
    "{% set ns = namespace() %}{% set ns.__dict__ = 1 %}": UNSAFE,
    "{{ dict.__init__.__globals__ }}": UNSAFE,
    "{% for k in messages.__iter__.__self__ %}{% endfor %}": UNSAFE,
    "{% include '/etc/passwd' %}": "failed with TypeError: no loader",
    "{{ messages.append(1) }}": UNSAFE,
    "{{ messages[0].update(role='x') }}": UNSAFE,
    "{{ range(10**9) | list }}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": DEEP,
    "{% if 1 %}" * 2000: DEEP,
    "{% for m in messages": "has a syntax error",
    "a\n{{ messages | nosuch }}": "line 2, has a syntax error: No filter named 'nosuch'",
    "a\n\n{{ x.y }}": "line 3, uses an undefined value: 'x' is undefined",
    "{{ messages[7].role }}": "undefined",
    "{{ 1/0 }}": "line 1, failed with ZeroDivisionError",
    "{{ raise_exception('only one\x1b[31m role') }}": r"refuses this conversation: only one \[31m role",
    "{{ raise_exception('a' * 100000) }}": "refuses this conversation",
}


def test_faulty_and_hostile_templates_are_refused_in_words() -> None:
    for template, why in HOSTILE.items():
        with pytest.raises(TokenizerError, match=why) as caught:
            made_with(template).apply_chat_template(HI)
        message, public = str(caught.value), caught.value.public  # pyright: ignore
        assert message == f"/place/{public}" and public.startswith("chat_template.jinja: the chat template")
        assert message.isprintable() and len(message) < 3000


def test_templates_that_are_slow_are_not_refused() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}ready"
    assert render(slow) == "ready"
