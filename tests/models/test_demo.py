"""The embedded demo model: its answers, expert specialisation, tokenizer, corpus and training."""

import json
import pathlib
from itertools import islice

import jax
import jinja2.sandbox
import numpy as np
import pytest
from flax import nnx

import nnxmoe
from tests.demo import corpus, exam, topics, train

FOLDER = pathlib.Path(nnxmoe.models.__file__).parent / "demo"


@pytest.fixture(scope="module")
def model() -> nnxmoe.CausalLM:
    return nnxmoe.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> nnxmoe.Tokenizer:
    return nnxmoe.Tokenizer.from_pretrained(FOLDER)


@pytest.mark.slow
def test_share_of_right_answers(tokenizer: nnxmoe.Tokenizer) -> None:
    """Exam with 20 questions per subject, and a sample of the numerous fact questions; in float32, as CPUs are fast."""
    model = nnxmoe.from_pretrained(FOLDER, strategy=nnxmoe.Strategy(compute_dtype="float32"))
    results = exam.sit(model, tokenizer, exam.sample(20))
    assert set(results) == set(exam.PASS)
    for subject, least in exam.PASS.items():
        wrong = [(question.prompt, said) for question, said, right in results[subject] if not right]
        assert 1 - len(wrong) / len(results[subject]) >= least, (subject, wrong[:5])


@pytest.mark.slow
def test_all_experts_are_used_and_specialise(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer) -> None:
    use = exam.expert_use(model, tokenizer)
    everything = np.mean(list(use.values()), axis=0)
    assert everything.min() > 0.02, "a dead expert"
    for one, other in (("sums", "story"), ("code", "story"), ("facts", "sums"), ("code", "counting")):
        apart = np.abs(use[one] - use[other]).sum(axis=-1) / 2  # total variation per layer
        assert apart.max() > 0.2, (one, other, apart)


def test_demo_size_and_files(model: nnxmoe.CausalLM) -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert sum(files.values()) < 1_200_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert model.dtype == np.dtype("bfloat16")
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(model.config.eos_token_id)


@pytest.mark.parametrize("text", ["What is 47 + 38?", "é 中 🙂\t\n", "", "def f(x):\n    return x", "\x00 <|user|>"])
def test_tokenizer_round_trips_and_splits_digits(tokenizer: nnxmoe.Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = [tokenizer.decode([token]) for token in ids]
    assert not any(len(piece) > 1 and any(map(str.isdigit, piece)) for piece in pieces)


def test_template_and_corpus_agree(tokenizer: nnxmoe.Tokenizer) -> None:
    turns = [("system", " Be brief. "), ("user", "Hello!"), ("assistant", "Hi."), ("user", "What is 1 + 1?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages) + corpus.EOS == corpus.chat(turns)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text())
    asked = template.render(messages=messages[-1:], bos_token=corpus.BOS, add_generation_prompt=True)
    assert asked == exam.ask("What is 1 + 1?")
    with pytest.raises(ValueError, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.slow
def test_corpus_is_deterministic_and_excludes_held_out_sums() -> None:
    first, again = (list(islice(corpus.documents(3), 4000)) for _ in range(2))
    assert first == again
    assert first[:100] != list(islice(corpus.documents(4), 100))
    text = "\n".join(document.text for document in first)
    shown = [(a, b) for a in range(100) for b in range(100) if f" {a} + {b} = " in text or f">{a} + {b} = " in text]
    assert len(shown) > 500 and not any(topics.held_out(a, b) for a, b in shown)


@pytest.mark.slow
def test_training_is_deterministic_and_writes_a_checkpoint(tmp_path: pathlib.Path) -> None:
    states = []
    for name in ("one", "two"):
        train.main(["--steps", "3", "--out", str(tmp_path / name), "--no-exam"])
        states.append(jax.tree.leaves(nnx.state(nnxmoe.from_pretrained(tmp_path / name))))
        nnxmoe.Tokenizer.from_pretrained(tmp_path / name).apply_chat_template([{"role": "user", "content": "x"}])
    assert all(np.array_equal(a, b) for a, b in zip(*states, strict=True))
    assert [path.name for path in tmp_path.iterdir()] in (["one", "two"], ["two", "one"])
