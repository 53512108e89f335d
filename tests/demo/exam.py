"""What the demo model should know: questions with their right answers, and which experts read what."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np

import nnxmoe
from tests.demo import topics
from tests.demo.corpus import KINDS, ONE_WORD, PIRATE, chat
from tests.demo.facts import BOYS, FACTS, GIRLS
from tests.demo.stories import ANIMALS

SEED = 2**31
# Required share of right answers, slightly below the results of the training script.
PASS = {
    "facts": 0.95,
    "facts in one word": 0.9,
    "facts from a pirate": 0.9,
    "facts in plain text": 0.9,
    "sums of two digits": 0.95,
    "unseen sums": 0.9,
    "unseen differences": 0.85,
    "counting": 0.9,
    "sorting": 0.8,
    "code": 0.9,
    "talk": 0.9,
    "word problems": 0.9,
    "stories": 0.7,
}


@dataclass(frozen=True)
class Question:
    """A prompt and the pattern of a right continuation; `tokens` is room enough for it."""

    subject: str
    prompt: str
    right: str
    tokens: int = 32


def ask(question: str, system: str = "") -> str:
    """The prompt of a chat that waits for its answer."""
    turns = [("system", system)] * bool(system) + [("user", question)]
    return chat(turns).removesuffix("<|eos|>") + "<|assistant|>"


def _facts() -> Iterable[Question]:
    for fact in FACTS:
        for question in fact.questions:
            yield Question("facts", ask(question), re.escape(fact.sentence))
        yield Question("facts in one word", ask(fact.questions[0], ONE_WORD), re.escape(fact.word))
        if fact.topic == "capital":
            yield Question(
                "facts from a pirate", ask(fact.questions[1], PIRATE), f"Arr, matey! {re.escape(fact.sentence)}"
            )
            start = fact.sentence.removesuffix(f" {fact.word}.")
            yield Question("facts in plain text", start, re.escape(f" {fact.word}."))


def _sums(rng: Random, count: int) -> Iterable[Question]:
    names = {"+": "unseen sums", "-": "unseen differences"}
    for sign, subject in names.items():
        pairs = [(a, b) for a, b in product(range(100), repeat=2) if a >= b or sign == "+"]
        for i, (a, b) in enumerate(rng.sample([pair for pair in pairs if topics.held_out(*pair, sign)], count)):
            exchange = topics.sum_exchange(a, b, sign, i)
            yield Question(subject, ask(exchange.question), re.escape(exchange.answer))
    for a, b in product(range(10), repeat=2):
        exchange = topics.sum_exchange(a, b, "+")
        yield Question("sums of two digits", ask(exchange.question), re.escape(exchange.answer))


def _drawn(rng: Random, count: int) -> Iterable[Question]:
    draws = {kind: KINDS[kind] for kind in ("counting", "code", "talk")}
    for subject, draw in (draws | {"sorting": topics.sorting, "word problems": topics.word_problem}).items():
        for exchange in (draw(rng) for _ in range(count)):
            yield Question(subject, ask(exchange.question), re.escape(exchange.answer), 64)


def _stories() -> Iterable[Question]:
    for name, animal in list(product((*GIRLS, *BOYS), ANIMALS))[::7]:
        she = "She" if name in GIRLS else "He"
        asked = f"Tell me a story about {'an' if animal[0] in 'aeiou' else 'a'} {animal} named {name}."
        told = (
            rf"Once upon a time there was a \w+ {animal} named {name}\. {she} lived .*"
            rf"\b(?!{name}\b)(\w+) the .* {name} and \1 were friends from that day on\. The end\."
        )
        yield Question("stories", ask(asked), told, 144)


def questions(count: int = 100) -> list[Question]:
    """All facts in all wordings, and `count` of every other subject.

    Unseen sums and differences are held out of training; the other subjects are small, and mostly seen there.
    """
    rng = Random(SEED)
    return [*_facts(), *_sums(rng, count), *_drawn(rng, count), *_stories()]


def sample(count: int) -> list[Question]:
    """``count`` questions per subject, and of the numerous ones on facts 120."""
    asked = questions(count)
    about = [question for question in asked if question.subject.startswith("facts")]
    return [q for q in asked if q not in about] + Random(1).sample(about, 120)


def complete(
    model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, prompts: Sequence[str], max_new_tokens: int
) -> list[str]:
    """The greedy continuation of each prompt, in one left-padded batch, without special tokens."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    width = max(map(len, encoded))
    tokens = np.full((len(encoded), width), tokenizer.pad_token_id, np.int32)
    mask = np.zeros_like(tokens)
    for row, ids in enumerate(encoded):
        tokens[row, width - len(ids) :], mask[row, width - len(ids) :] = ids, 1
    out = nnxmoe.generate(model, tokens, attention_mask=mask, max_new_tokens=max_new_tokens)
    return [tokenizer.decode(row[width:].tolist(), skip_special_tokens=True) for row in out]


def sit(
    model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, asked: Sequence[Question], batch: int = 128
) -> dict[str, list[tuple[Question, str, bool]]]:
    """(question, continuation, whether it is right) by subject."""
    results: dict[str, list[tuple[Question, str, bool]]] = {}
    queue = sorted(asked, key=lambda question: (question.tokens, len(question.prompt)))
    for start in range(0, len(queue), batch):
        some = queue[start : start + batch]
        said = complete(model, tokenizer, [question.prompt for question in some], some[-1].tokens)
        for question, text in zip(some, said, strict=True):
            right = re.fullmatch(question.right, text, re.DOTALL) is not None
            results.setdefault(question.subject, []).append((question, text, right))
    return results


def expert_use(model: nnxmoe.CausalLM, tokenizer: nnxmoe.Tokenizer, count: int = 48) -> dict[str, np.ndarray]:
    """For each kind of text, the share of its choices that went to each expert, [L, E]; rows sum to 1."""
    rng, use = Random(SEED), {}
    for kind in KINDS:
        drawn = [KINDS[kind](rng) for _ in range(count)]
        encoded = [tokenizer.encode(exchange.plain or exchange.answer)[:128] for exchange in drawn]
        tokens = np.full((count, 128), tokenizer.pad_token_id, np.int32)
        for row, ids in enumerate(encoded):
            tokens[row, : len(ids)] = ids
        real = tokens != tokenizer.pad_token_id
        routing = model(tokens, attention_mask=real, return_routing=True).routing or {}
        shares = []
        for layer in sorted(routing):
            chosen = np.asarray(routing[layer].experts)[real].ravel()
            shares.append(np.bincount(chosen, minlength=routing[layer].scores.shape[-1]) / chosen.size)
        use[kind] = np.stack(shares)
    return use
