"""The tokenizer, streaming decoding, and untrusted chat templates."""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from nnxmoe.generation import chat_template, decode
from nnxmoe.generation.chat_template import ChatTemplateError, render_chat_template
from nnxmoe.generation.text import TextStream, Tokenizer, TokenizerError

CASES = sorted((Path(__file__).parent / "data" / "hf").glob("*/case.json"))
MODEL = Path(__file__).parent / "data" / "hf" / "llama_basic" / "model"
HI = [{"role": "user", "content": "hi"}]


def render(template: str, **variables: Any) -> str:
    return render_chat_template(template, {"messages": HI, **variables})


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
    change_json(config, eos_token={"content": "<|end|>", "lstrip": False}, pad_token=None, added_tokens_decoder={})
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": {"content": "<|eos|>"}, "bos_token": "X"}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}")
    tokenizer = Tokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|bos|>", "<|end|>", "<|eos|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token, tokenizer.pad_token_id) == (299, None, None)
    assert tokenizer.apply_chat_template(HI) == "<|bos|><|end|><|eos|>"
    assert tokenizer.apply_chat_template(HI, bos_token="B") == "B<|end|><|eos|>"


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
        ("tokenizer.json", "[]", r"tokenizer\.json must hold a JSON object"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer that 'tokenizers'"),
        ("tokenizer.json", '{"model": {"type": "Nope"}}', r"tokenizer\.json: unknown tokenizer model 'Nope'"),
        ("tokenizer.json", "[" * 100_000, r"tokenizer\.json is not valid JSON"),
        ("tokenizer_config.json", "no", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "\xff", r"tokenizer_config\.json is not valid JSON"),
        ("tokenizer_config.json", "3", r"tokenizer_config\.json must hold a JSON object"),
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
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_pretrained(folder)


def test_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing.*SentencePiece.*converted"):
        Tokenizer.from_pretrained(tmp_path)
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
    assert not any("*" in pattern or "safetensors" in pattern for pattern in asked["allow_patterns"])


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
    new = [fox, hello, fox]
    monkeypatch.setattr(decode, "_ids_of_one", lambda *_: iter(new))
    model: Any = None  # the only use of it is patched away
    pieces = list(decode.stream(model, tokenizer, [hello], eos_token_id=None))
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


def test_arguments_unused_by_the_template_are_refused() -> None:
    tokenizer = made_with("{% if date is not defined %}{% set date = 'today' %}{% endif %}{{ date }}")
    assert tokenizer.apply_chat_template(HI, date="Monday") == "Monday"
    assert tokenizer.apply_chat_template(HI) == "today"
    with pytest.raises(TypeError, match=r"unexpected argument 'dat'.*did you mean 'date'"):
        tokenizer.apply_chat_template(HI, dat="Monday")
    with pytest.raises(TypeError, match=r"unexpected argument 'add_generation_promt'.*did you mean 'add_gen"):
        tokenizer.apply_chat_template(HI, add_generation_promt=True)
    with pytest.raises(TypeError, match=r"unexpected argument 'return_tensors'.*leave it out"):
        tokenizer.apply_chat_template(HI, return_tensors="np")


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
        with pytest.raises(TokenizerError, match="the last message has no text 'content'"):
            made_with(PLAIN).apply_chat_template([*HI, last], continue_final_message=True)
    for template in ("{{ messages[0].role }}", "{{ messages[0].content | upper }}"):
        with pytest.raises(TokenizerError, match="leaves out the last message"):
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
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {"default": template}, "made here")


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


def test_long_messages() -> None:
    text = "é🦊<" * 400_000
    assert render("{% for m in messages %}{{ m.content | trim }}{% endfor %}", messages=[{"content": text}]) == text
    with pytest.raises(ChatTemplateError, match="characters of messages"):
        render("", messages=[{"content": "a" * 5_000_000}])


def test_lone_surrogates_are_kept() -> None:
    assert render("{{ messages[0].content }}", messages=[{"content": "\ud800\u2028\0"}]) == "\ud800\u2028\0"


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], None, [], 5])
@pytest.mark.wrong_types
def test_invalid_messages(messages: Any) -> None:
    with pytest.raises(TokenizerError, match="messages"):
        made_with("").apply_chat_template(messages)


def test_template_arguments_must_be_json_values() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for bad in (len, np.ones(2), endless, object()):
        with pytest.raises(TokenizerError, match="made here: the chat template cannot be given"):
            made_with("").apply_chat_template(HI, x=bad)


# Hostile templates

SLOW, BIG, UNSAFE, DEEP = "took longer than the 1 s", "needs more than 64 MB", "that is not allowed", "too deeply"
HOSTILE = {
    "{{ ''.__class__.__mro__ }}": UNSAFE,
    "{{ ''['__class__']['__mro__'][1]['__subclasses__']() }}": "undefined|that is not allowed",
    "{{ ''|attr('__class__')|attr('__mro__') }}{{ ().__class__.__base__.__subclasses__() }}": UNSAFE,
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": UNSAFE,
    "{{ lipsum.__globals__['os'].environ }}": UNSAFE,
    "{{ joiner.__init__.__globals__ }}": UNSAFE,
    "{{ raise_exception.__globals__.sys.modules }}": UNSAFE + "|undefined",
    "{{ namespace(__class__=1) }}": UNSAFE,
    "{% set ns = namespace() %}{% set ns.__dict__ = 1 %}": UNSAFE,
    "{{ namespace.__init__.__globals__ }}": UNSAFE,
    "{{ self.__init__.__globals__ }}": UNSAFE + "|undefined",
    "{{ '{0.__class__.__mro__.x}'.format(1) }}{{ 1/0 }}": "failed|undefined|that is not allowed",
    "{% for k in messages.__iter__.__self__ %}{% endfor %}": UNSAFE,
    "{% include '/etc/passwd' %}": "includes another template",
    "{% include '/etc/passwd' ignore missing %}": "includes another template",
    "{% import 'x' as y %}": "includes another template",
    "{% from 'x' import y %}": "includes another template",
    "{% extends 'x' %}": "includes another template",
    "{{ messages.append(1) }}": UNSAFE,
    "{{ messages[0].update(role='x') }}": UNSAFE,
    "{{ messages.clear() }}": UNSAFE,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": SLOW,
    "{% if false %}{{ 9**(9**9) }}{% endif %}": SLOW,
    "{{ 9**(9**9) }}": SLOW,
    "{{ lipsum(n=100000) }}": SLOW,
    "{% for a in ['x' * 5000000] %}{% for i in range(99999) %}{{ 'y' in a }}{% endfor %}{% endfor %}": SLOW,
    "{{ 'a' * 10**10 }}": BIG,
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}": BIG,
    "{{ [0] * 10**9 }}": BIG,
    "{{ '%1000000000d' % 1 }}": BIG,
    "{{ '{:1000000000d}'.format(1) }}": BIG,
    "{{ strftime_now('%Y' * 10**7) }}": BIG + "|" + SLOW,
    "{{ range(10**9) | list }}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": DEEP,
    "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}": DEEP,
    "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "writes more than 4194304",
    "{{ 'a' * (5 * 1024 * 1024) }}": "writes more than 4194304",
    "{% if 1 %}" * 2000: DEEP,
    "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}": DEEP,
    "{{ " + "not " * 20000 + "1 }}": DEEP,
    "{{ 1" + "+1" * 60000 + " }}": DEEP + "|" + SLOW + "|" + BIG,
    "{% if 1 %}" * 100 + "{% endif %}" * 100: "failed|" + DEEP,
    "x" * 300_000: "300000 characters long",
    "{% for m in messages": "has a syntax error",
    "a\n{{ messages | nosuch }}": "line 2, has a syntax error: No filter named 'nosuch'",
    "a\n\n{{ x.y }}": "line 3, uses something undefined: 'x' is undefined",
    "{{ messages[7].role }}": "undefined",
    "{{ 1/0 }}": "failed with ZeroDivisionError",
    "{{ raise_exception('only one\x1b[31m role') }}": r"refuses this conversation: only one \[31m role",
    "{{ raise_exception('a' * 100000) }}": "refuses this conversation",
}


@pytest.mark.parametrize("template", HOSTILE, ids=lambda text: text[:40])
def test_hostile_templates_are_refused(template: str) -> None:
    resource = pytest.importorskip("resource")
    render("")  # exclude the start of the process from the time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(TokenizerError, match=HOSTILE[template]) as caught:
        made_with(template).apply_chat_template(HI)
    assert time.monotonic() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000
    message = str(caught.value)
    assert message.startswith("made here: the chat template") and len(message) < 3000 and message.isprintable()
    assert render("{{ messages[0].content }}") == "hi"


def test_escaped_template_cannot_access_files_or_secrets(tmp_path: Path) -> None:
    """Code that escapes the sandbox can neither open files or sockets nor read environment variables."""
    source = importlib.util.find_spec("nnxmoe.generation.template_worker")
    assert source and source.origin
    escaped = (
        Path(source.origin)
        .read_text()
        .replace(
            "def raise_exception(message: object) -> NoReturn:",
            "def raise_exception(message):\n    return eval(message)\n",
        )
    )
    worker = tmp_path / "template_worker.py"
    worker.write_text(escaped)
    here = tmp_path / "chat_template.py"
    here.write_text(Path(chat_template.__file__).read_text())
    spec = importlib.util.spec_from_file_location("escaped", here)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    os.environ["SOME_TOKEN"] = "secret"
    try:
        for code in (
            "open('/etc/passwd').read()",
            f"open({str(tmp_path / 'new')!r}, 'w')",
            "__import__('socket').socket()",
        ):
            with pytest.raises(module.ChatTemplateError, match=r"OSError|Too many open files"):
                module.render_chat_template("{{ raise_exception(code) }}", {"code": code})
        secrets = {"code": "__import__('os').environ.get('SOME_TOKEN', 'hidden')"}
        assert module.render_chat_template("{{ raise_exception(code) }}", secrets) == "hidden"
        loaded = {"code": "[m for m in __import__('sys').modules if m.split('.')[0] in ('jax', 'nnxmoe', 'numpy')]"}
        assert module.render_chat_template("{{ raise_exception(code) }}", loaded) == "[]"
        for code in ("__import__('os')._exit(3)", "__import__('os').write(1, b'{broken}' * 10)"):
            with pytest.raises(module.ChatTemplateError, match="ended its process"):
                module.render_chat_template("{{ raise_exception(code) }}", {"code": code})
    finally:
        del os.environ["SOME_TOKEN"]
        module._renderer.close()
    assert not (tmp_path / "new").exists()


# The worker process


def worker_pid() -> int:
    render("")
    worker = chat_template._renderer._worker
    assert worker
    return worker._process.pid


def test_worker_process_is_reused_and_replaced_if_killed() -> None:
    pid = worker_pid()
    assert worker_pid() == pid
    os.kill(pid, 9)
    with pytest.raises(ChatTemplateError, match="ended its process"):
        for _ in range(100):  # the kill may take a moment
            render("")
            time.sleep(0.01)
    assert worker_pid() != pid


def test_threads_share_the_worker() -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        wrong.extend(t for _ in range(20) if (t := render("{{ n }}", n=number)) != str(number))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_worker_that_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    chat_template._renderer.close()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(ChatTemplateError, match="cannot start a process for chat templates"):
        render("")
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "false")
    with pytest.raises(ChatTemplateError, match=r"ended at its start \(exit code 1\)"):
        render("")
    monkeypatch.undo()
    assert render("x") == "x"


LIFE = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("c", PATH)
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
assert c.render_chat_template("a", {}) == "a"
first = c._renderer._worker._process.pid
if HOW == "fork" and (child := os.fork()):
    assert os.waitpid(child, 0)[1] == 0
assert c.render_chat_template("b", {}) == "b"
second = c._renderer._worker._process.pid
if HOW == "fork":
    assert (second == first) == bool(child), "only the child has a worker of its own"
print(first, second, flush=True)
if HOW == "kill":
    os.kill(os.getpid(), 9)
assert "jinja2" not in sys.modules
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("how", ["exit", "fork", "kill"])
def test_worker_exits_with_its_parent(how: str) -> None:
    program = f"PATH, HOW = {chat_template.__file__!r}, {how!r}\n{LIFE}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == (-9 if how == "kill" else 0)
    pids = {int(pid) for pid in done.stdout.split()}
    deadline = time.monotonic() + 5
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pids and not any(runs(pid) for pid in pids)


def runs(pid: int) -> bool:
    """Whether the process is running; zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
