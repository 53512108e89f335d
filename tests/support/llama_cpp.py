"""Ids of llama.cpp for the tokenizers of GGUF files. ``python -m tests.support.llama_cpp`` writes them as test data.

Needs ``xllamacpp``, a wheel with llama.cpp and its server, which loads models with weights only: these are zeros.
"""

import json
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

DATA = Path(__file__).resolve().parents[1] / "data" / "gguf_ids.json"
WIDTH = 32
# Of the values of tokenizer.ggml.pre with the same rules, one each.
DISTINCT = [
    *("default", "gpt-2", "smollm", "llama-bpe", "glm4", "qwen2", "qwen35", "tekken", "gpt-4o", "deepseek-v3"),
    *("deepseek-llm", "deepseek-coder", "kimi-k2", "bailingmoe", "seed-coder", "poro-chat", "viking"),
]

TEXTS = [
    "Hello world, it's 12345 o'clock!  I'M  here\n\n\tfoo",
    "def f(x):\n    return x**2  # ok; a=b+c<=>^~|$",
    "don't DON'T we'll 1234567 (3.14)",
    " leading and trailing  ",
    "",
    " ",
    "\r\n \r\n",
    "/a//x",
    "ünïcödé ÀÉ é",
    "abc abc é<tool>bc</s>",
    "<s>[INST] abc [/INST]  abc</s><s>abc",
    "</s>abc</s> abc</s>  abc</s>\nabc",
    "abc<tool> abc<tool>abc <tool> ",
    "▁abc ▁ abc",
    "<s>",
    "a<s>b</s>",
    "\n</s>\n",
    "<unk>abc<0x41>",
    "a<|im_end|>b<|end|>c",
]


def sentencepiece() -> dict[str, Any]:
    """A vocabulary of SentencePiece with bytes, control tokens and one that is matched as a whole."""
    words = ["▁", *"abcdehlo[]/INST", "▁a", "ab", "▁ab", "bc", "abc", "▁abc", "▁[", "he", "▁he", "ll", "llo", "▁▁", "1"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{octet:02X}>" for octet in range(256)), *words, "<tool>", "<|im_end|>"]
    return {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens},
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words), 4, 1],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 * number for number in range(len(words) + 2)],
    }


def byte_level() -> dict[str, Any]:
    """A byte-level vocabulary whose merges are those of the texts, with control tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<|end|>", "<tool>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=alphabet)  # pyright: ignore
    backend.train_from_iterator(TEXTS * 2, trainer)
    stored = json.loads(backend.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    return {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens},
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(tokens) - 4)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stored["merges"]],
    }


def cases(splits: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Name -> metadata of a tokenizer."""
    key, ids = "tokenizer.ggml.", {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    spm, bpe = sentencepiece(), byte_level()
    phi3 = ["<|endoftext|>" if token == "1" else token for token in spm[f"{key}tokens"]]
    bpe_ids = {f"{key}bos_token_id": 0, f"{key}eos_token_id": 1}
    found = {
        "spm": spm,
        "spm ids": spm | ids,
        **{f"spm add_space_prefix {on}": spm | {f"{key}add_space_prefix": on} for on in (True, False)},
        "spm no bos": spm | {f"{key}add_bos_token": False},
        "spm eos": spm | {f"{key}add_eos_token": True},
        "spm bos 2": spm | {f"{key}bos_token_id": 2},
        "spm extra whitespace": spm | {f"{key}remove_extra_whitespaces": True},
        "spm phi-3": spm | {"general.name": "Phi-3 mini", f"{key}tokens": phi3},
        "bpe": bpe,
        "bpe space": bpe | bpe_ids | {f"{key}pre": "gpt-2", f"{key}add_space_prefix": True},
        "bpe bos": bpe | {f"{key}pre": "gpt-2", f"{key}add_bos_token": True, f"{key}add_eos_token": True},
        "bpe llama3 default ids": bpe | {f"{key}pre": "llama-bpe"},
    }
    return found | {f"bpe {split}": bpe | bpe_ids | {f"{key}pre": split} for split in splits}


def write(file: Path, metadata: dict[str, Any]) -> Path:
    """Write a Llama of one layer with this tokenizer."""
    writer, count = gguf.GGUFWriter(file, "llama"), len(metadata["tokenizer.ggml.tokens"])
    sizes = {"block_count": 1, "context_length": 64, "attention.head_count": 1, "rope.dimension_count": WIDTH}
    for name, size in (sizes | {"embedding_length": WIDTH, "feed_forward_length": WIDTH}).items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in metadata.items():
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(name, value, kind)
    shapes = {"token_embd": (count, WIDTH), "output_norm": (WIDTH,), "blk.0.attn_norm": (WIDTH,)}
    shapes |= {"blk.0.ffn_norm": (WIDTH,)}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}": (WIDTH, WIDTH) for name in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def ids(file: Path, texts: list[str]) -> list[list[int]]:
    """The ids of llama.cpp, with special tokens added and parsed."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(file), 64, 1
    options.warmup, options.verbosity = False, -1
    server, found = xllamacpp.Server(options), []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, metadata in cases(DISTINCT).items():
            found[name] = ids(write(Path(folder) / "model.gguf", metadata), TEXTS)
    rows = (f"{json.dumps(name)}: {json.dumps(rows, separators=(',', ':'))}" for name, rows in found.items())
    DATA.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
