"""generation_config.json: what it asks for is applied with Sampling.from_checkpoint, and named where it is not."""

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import nnxmoe
from nnxmoe.apps.cli.loading import sampling_of
from nnxmoe.generation.rules import Rules
from nnxmoe.generation.sampling import OPTIONS

MODEL = Path(__file__).parents[1] / "data" / "hf" / "llama_basic" / "model"
PROMPTS = np.array([[5, 9, 9, 40], [7, 30, 31, 30]])
NEW = 12
REPEATING = {"repetition_penalty": 0.3}


@pytest.fixture
def model() -> nnxmoe.CausalLM:
    return nnxmoe.from_pretrained(MODEL)


def greedy(model: nnxmoe.CausalLM) -> list[int]:
    model.generation_config = {"eos_token_id": None}
    return nnxmoe.generate(model, PROMPTS, max_new_tokens=NEW)[:, 4:].tolist()


def configs(plain: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Fields that change the ids ``plain`` of greedy decoding."""
    a, b = plain[0], plain[1]
    return {
        "repetition_penalty": REPEATING,
        "no_repeat_ngram_size 1": REPEATING | {"no_repeat_ngram_size": 1},
        "no_repeat_ngram_size 2": REPEATING | {"no_repeat_ngram_size": 2},
        "no_repeat_ngram_size 4": REPEATING | {"no_repeat_ngram_size": 4},
        "suppress_tokens": {"suppress_tokens": [a[0], b[2]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [a[0], b[0]]},
        "min_new_tokens": {"eos_token_id": [a[1], b[2]], "min_new_tokens": 7},
        "min_length": {"eos_token_id": [a[1], b[2]], "min_length": 9},
        "bad_words_ids": {"bad_words_ids": [[a[0]], [b[0], b[1]], b[1:4], [PROMPTS[1, 3].item(), b[0]]]},
        "bad words that are ends": {"eos_token_id": a[1], "bad_words_ids": [[a[1]], [a[2]]]},
        "sequence_bias": {"sequence_bias": [[[a[0]], -50.0], [[b[0], 17], 90.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 11},
        "several": REPEATING | {"no_repeat_ngram_size": 3, "suppress_tokens": [a[0]], "forced_eos_token_id": 7},
        "do_sample with one token": {"do_sample": True, "top_k": 1, "temperature": 0.7, "suppress_tokens": [a[1]]},
    }  # fmt: skip


@pytest.mark.oracle
def test_fields_against_transformers(model: nnxmoe.CausalLM) -> None:
    """Ids of both rows together, and in an engine that also has a row without rules."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    plain = greedy(model)
    for name, fields in configs(plain).items():
        fields = {"eos_token_id": None, "pad_token_id": 0} | fields
        reference.generation_config = transformers.GenerationConfig(**fields)
        tokens = torch.tensor(PROMPTS)
        expected = reference.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW).numpy()
        assert expected[:, 4:].tolist() != plain or name == "no_repeat_ngram_size 1", name  # which undoes the penalty
        model.generation_config = fields
        sampling = nnxmoe.Sampling.from_checkpoint(model)
        made = nnxmoe.generate(model, PROMPTS, max_new_tokens=NEW, sampling=sampling)
        np.testing.assert_array_equal(made, expected, err_msg=name)


@pytest.mark.slow
def test_rows_with_different_rules_share_an_engine(model: nnxmoe.CausalLM) -> None:
    plain = greedy(model)
    rules = [Rules(ngram=1), None, Rules(forced_end=(11,)), Rules(suppressed=(plain[1][0],))]
    given = [nnxmoe.Sampling(temperature=0.0, rules=one, repetition_penalty=0.3) for i, one in enumerate(rules)]
    wanted = [nnxmoe.RequestOptions(NEW, sampling=one) for one in given]
    limits = nnxmoe.EngineLimits(
        sampling=nnxmoe.EngineLimits().sampling._replace(rules=tuple(one for one in rules if one))
    )
    engine = nnxmoe.Engine(model, slots=4, capacity=64, limits=limits)
    requests = [engine.submit(PROMPTS[i % 2], one) for i, one in enumerate(wanted)]
    engine.run()
    for i, request in enumerate(requests):
        alone = nnxmoe.generate(model, PROMPTS[[i % 2]], max_new_tokens=NEW, sampling=given[i], eos_token_id=None)
        assert request.ids == alone[0, 4:].tolist(), rules[i]
    with pytest.raises(ValueError, match="this engine has"):
        engine.submit([1], nnxmoe.RequestOptions(NEW, sampling=nnxmoe.Sampling(rules=Rules(ngram=5))))


def test_sampling_of_a_checkpoint(model: nnxmoe.CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    for fields, expected in (
        ({}, nnxmoe.Sampling(temperature=0.0)),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": False}, nnxmoe.Sampling(temperature=0.0)),
        ({"do_sample": True}, nnxmoe.Sampling(1.0, top_k=50)),
        ({"do_sample": True, "temperature": None, "top_k": 0, "top_p": 0.8}, nnxmoe.Sampling(1.0, 0, 0.8)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1}, nnxmoe.Sampling(0.6, 20, 1.0, 0.1)),
        ({"min_length": 5, "min_new_tokens": 3}, nnxmoe.Sampling(temperature=0.0, min_new_tokens=3)),
        ({"min_length": 5, "min_new_tokens": 0}, nnxmoe.Sampling(temperature=0.0)),
        ({"bad_words_ids": [], "suppress_tokens": None, "num_beams": 1}, nnxmoe.Sampling(temperature=0.0)),
    ):
        model.generation_config = fields
        assert nnxmoe.Sampling.from_checkpoint(model) == expected, fields
    assert not caplog.text
    model.generation_config = {"num_beams": 4, "guidance_scale": 1.5, "top_h": 0.3, "repetition_penalty": 1.1}
    assert nnxmoe.Sampling.from_checkpoint(model) == nnxmoe.Sampling(temperature=0.0, repetition_penalty=1.1)
    assert "num_beams=4, guidance_scale=1.5: not supported" in caplog.text and "top_h" not in caplog.text
    for bad in ({"repetition_penalty": "x"}, {"bad_words_ids": [5]}, {"bad_words_ids": [[]]}, {"min_new_tokens": -1}):
        model.generation_config = bad
        with pytest.raises(ValueError, match=rf"generation_config\.json: {next(iter(bad))}="):
            nnxmoe.Sampling.from_checkpoint(model)


@pytest.mark.slow
def test_fields_that_are_not_applied_are_named_once(model: nnxmoe.CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model.generation_config = {"do_sample": True, "temperature": 0.6, "num_beams": 2, "top_p": 1.0, "max_length": 9}
    nnxmoe.generate(model, PROMPTS, max_new_tokens=1, sampling=nnxmoe.Sampling(0.0))
    assert not caplog.text
    for _ in range(2):
        nnxmoe.generate(model, PROMPTS, max_new_tokens=1)
        list(nnxmoe.complete(model, [[5]], max_new_tokens=1))
    (record,) = caplog.records
    assert "do_sample=True, temperature=0.6, num_beams=2, which is not applied" in record.getMessage()
    assert "Sampling.from_checkpoint(model)" in record.getMessage()


@pytest.mark.slow
def test_ids_outside_the_vocabulary_are_ignored(model: nnxmoe.CausalLM) -> None:
    (first, second, *_), _ = greedy(model)
    model.generation_config = {"eos_token_id": [float(second), 10**9, -1], "pad_token_id": 3000, "bos_token_id": [1]}
    made = nnxmoe.generate(model, PROMPTS, max_new_tokens=5)
    assert made[0, 4:6].tolist() == [first, second] and set(made[0, 6:].tolist()) <= {second}


def test_chat_and_serve_take_the_checkpoints_sampling(model: nnxmoe.CausalLM) -> None:
    """Options of a command and fields of a request override it, one by one."""
    pytest.importorskip("msgspec")
    from nnxmoe.apps.serve.requests import Planner, default_sampling
    from nnxmoe.apps.serve.schema import CompletionRequest
    from nnxmoe.apps.serve.server import serving_engine
    from nnxmoe.apps.serve.settings import ServerSettings

    model.generation_config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "suppress_tokens": [3]}
    sampling = nnxmoe.Sampling.from_checkpoint(model)
    flags = dict.fromkeys(OPTIONS) | {"top_p": 0.5}
    assert sampling_of(argparse.Namespace(**flags), sampling) == dataclasses.replace(sampling, top_p=0.5)
    assert sampling_of(argparse.Namespace(**flags | {"top_p": None})) == nnxmoe.Sampling(temperature=0.0)
    engine = serving_engine(model, slots=1, capacity=64)
    planner = Planner(engine, nnxmoe.Tokenizer.from_pretrained(MODEL), ServerSettings("tiny"))
    for fields, expected in (
        ({}, sampling),
        ({"temperature": 0.0}, dataclasses.replace(sampling, temperature=0.0)),
        ({"top_k": -1, "top_p": 1.0}, dataclasses.replace(sampling, top_k=None, top_p=1.0)),
    ):
        plan = planner.completion(CompletionRequest(model="tiny", prompt=[1, 2], **fields))
        assert plan.options.sampling == expected
        engine.submit(plan.prompts[0], plan.options)
    model.generation_config = {"repetition_penalty": 1.2}
    assert default_sampling(model) == nnxmoe.Sampling(1.0, repetition_penalty=1.2)


@pytest.mark.slow
def test_fewest_tokens_with_dynamic_rotary_embeddings() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields = {"model_type": "llama", "vocab_size": 64, "max_position_embeddings": 16, "rope_parameters": rope} | small
    model = nnxmoe.models.Llama(nnxmoe.models.config_from_hf(fields), rngs=nnx.Rngs(0))
    end = int(nnxmoe.generate(model, [[1, 2, 3]], max_new_tokens=1, eos_token_id=None)[0, 3])
    sampling = nnxmoe.Sampling(0.0, min_new_tokens=4)
    made = nnxmoe.generate(model, [[1, 2, 3]], max_new_tokens=5, sampling=sampling, eos_token_id=end)[0, 3:]
    assert end not in made[:4].tolist() and len(made) == 5
    with pytest.raises(ValueError, match="Generate one row at a time"):
        nnxmoe.generate(model, [[1, 2], [3, 4]], max_new_tokens=5, sampling=sampling, eos_token_id=end)
