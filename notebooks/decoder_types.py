"""Rows of the site's page that lists which decoder types of transformers load, and why the other types do not.

The types are the model types of ``AutoModelForCausalLM``. ``python -m tests.support.declared`` writes them to
``decoders`` in ``tests/data/declared_fields.json``. `REASONS` has the reason for each type that does not load.
"""

import json
from pathlib import Path
from typing import Any

from nnxmoe import models
from nnxmoe.models.registry import TEXT_OF

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "declared_fields.json"

# Reason -> model types that do not load, separated by spaces.
REASONS = {
    "an encoder, or the decoder of an encoder-decoder model": """bart bert bert-generation big_bird bigbird_pegasus
        blenderbot blenderbot-small camembert data2vec-text electra ernie marian mbart megatron-bert modernbert-decoder
        mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm
        xlm-roberta xlm-roberta-xl xlnet xmod""",
    "an audio decoder": "moshi musicgen musicgen_melody",
    "learned, sinusoidal or ALiBi positions, and LayerNorm": """biogpt bloom ctrl git gpt-sw3 gpt2 gpt_bigcode gpt_neo
        mpt openai-gpt opt xglm""",
    "position biases (CPM-Ant)": "cpmant",
    "attention by hashes (Reformer)": "reformer",
    "LayerNorm with biases": "jais2 nemotron persimmon fuyu stablelm starcoder2",
    "LayerNorm without parameters": "olmo",
    "LayerNorm, and attention beside the feed-forward": """codegen cohere cohere2 cohere_compass_text falcon gpt_neox
        gpt_neox_japanese gptj phi""",
    "LayerNorm, and attention beside the experts": "cohere2_moe",
    "LayerNorm, and one projection for queries, keys and values that is clipped": "dbrx",
    "LayerNorm, and routing by SparseMixer": "phimoe",
    "Mamba-1": "falcon_mamba jamba mamba",
    "only Mamba-2 layers": "mamba2",
    "Mamba layers with one attention layer that several layers share": "zamba zamba2",
    "Mamba-2 beside attention in each layer": "falcon_h1",
    "RWKV, xLSTM and RG-LRU recurrences": "recurrent_gemma rwkv xlstm",
    "lightning attention": "minimax",
    "cross-attention to images": "mllama",
    "image tokens, or a file layout of their own": """aria_text emu3 gemma4_unified gemma4_unified_text got_ocr2
        moss_transcribe_diarize phi4_multimodal""",
    "a draft model that reads another model's keys": "gemma4_assistant gemma4_unified_assistant",
    "bytes in patches": "blt",
    "weights of three values (BitNet)": "bitnet",
    "differential attention": "diffllama",
    "dynamic masks, and experts by product keys": "doge",
    "layers that are repeated in cycles": "hrm_text inkling2_loop_text",
    "experts that share attention's projections": "jetmoe",
    "normalized residuals of three streams (AltUp, Laurel)": "gemma3n gemma3n_text",
    "xIELU activation": "apertus apertus1p5_text",
    "a norm after the experts, or gated norms": "axk1 axk2",
    "convolutions of keys and values, and relative positions": "inkling2_text inkling_text",
    "chunked attention, and router weights on the experts' inputs": "llama4 llama4_text",
    "two attention parts in each layer, and experts that return their input": "longcat_flash",
    "window layers of latent attention": "dots3_note dots3_note_text",
    "compressed convolutional attention": "zaya",
    "norms of queries and keys after rotation": "hunyuan_v1_dense hunyuan_v1_moe nanochat",
    "a router bias before the sigmoid, and post norms": "kolibri1",
    "learned scales of normalized queries, keys and logits": "dory",
    "layers like those of a supported family, not implemented yet": """arcee bamba beam cwm ernie4_5
        exaone flex_olmo flint gemma gemma2 glm glm4 granite_swa granitemoe_swa helium hyperclovax internlm3 iquestcoder
        lara_mini lfm3 minicpm3 ministral olmo2 olmo_hybrid seed_oss vaultgemma youtu""",
}
REASON_OF = {model_type: reason for reason, types in REASONS.items() for model_type in types.split()}


def _stored() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


def version() -> str:
    """Return the version of transformers that defines these types."""
    return _stored()["transformers"]


def supported_type(model_type: str) -> str | None:
    """Return the supported ``model_type`` with which a config.json of this type loads. `None` if it does not load."""
    candidates = TEXT_OF.get(model_type, model_type), f"{model_type}_text"
    return next((candidate for candidate in candidates if candidate in models.FAMILIES), None)


def decoder_rows() -> list[tuple[str, str, str]]:
    """Return the rows of the page: ``model_type``, supported type (or an empty string), reason."""
    types = sorted({*_stored()["decoders"], *models.FAMILIES})
    return [(name, supported_type(name) or "", REASON_OF.get(name, "")) for name in types]
