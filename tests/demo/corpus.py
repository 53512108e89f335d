"""The demo's training text: seeded documents of six kinds, as plain text and as chats."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tests.demo.facts import BOYS, CAPITAL_QUESTIONS, CAPITALS, GIRLS
from tests.demo.stories import story
from tests.demo.topics import Exchange, code, counting, fact, sums

BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
ONE_WORD = "Answer in one word."
PIRATE = "Talk like a pirate."
_NEUTRAL = ("You are a helpful assistant.", "You are a kind little model.", "Answer the question.")
_TALK = {
    ("Hello!", "Hi!", "Hello there!", "Good morning!"): "Hello! What would you like to know?",
    ("How are you?", "How are you today?"): "I am fine, thank you. All my experts are awake.",
    ("Who are you?", "What are you?", "What is your name?"): (
        "I am a tiny mixture-of-experts model. I know a few facts, and I like stories."
    ),
    ("What can you do?", "What do you know?", "Help!"): (
        "I can name capitals, work out sums, count, sort, write small functions and tell stories."
    ),
    ("Who made you?", "How were you made?"): "A small script made me in a few minutes.",
    ("How big are you?", "How large are you?"): "I am about one megabyte.",
    ("What is a mixture of experts?", "How do you work?"): (
        "Each of my layers has several experts. A router sends each token to two of them."
    ),
    (
        "What is a router?",
        "What does a router do?",
    ): "A router scores the experts and picks the best two for each token.",
    (
        "What is an expert?",
        "What does an expert do?",
    ): "An expert is a small network that reads only some of the tokens.",
    ("What is a token?",): "A token is a small piece of text, such as a word or a digit.",
    ("What is JAX?",): "JAX is a library for fast numerical programs in Python.",
    ("What is Flax?",): "Flax is a library for neural networks in JAX.",
    ("What does the fox say?", "What sound does a fox make?"): "Nobody knows what the fox says.",
    ("I am sad.", "I feel sad."): "I am sorry to hear that. Shall I tell you a story?",
    ("I am happy.", "I feel good."): "I am glad to hear that.",
    ("Thank you!", "Thanks!"): "You are welcome!",
    ("Goodbye!", "Bye!", "Good night!"): "Goodbye! Come back soon.",
    ("Tell me a joke.", "Do you know a joke?"): "Why was the expert so lonely? The router never picked it.",
    ("Tell me another joke.", "Another joke, please."): "How does a small model say sorry? With a very low loss.",
}
_UNKNOWN = (
    "What is the meaning of life?",
    "Who won the game?",
    "What is the weather like?",
    "How old is the moon?",
    "What time is it?",
    "Can you drive a car?",
    "Why is the sea salty?",
    "When does the train leave?",
    "Who is the {who} of {country}?",
    "Who was the first {who} of {country}?",
    "How many people live in {country}?",
    "How old is {name}?",
    "Where does {name} live?",
    "What does {name} like to eat?",
)


def _invented(rng: Random) -> str:
    """A made-up place, such as 'Zorbia'."""
    parts = [
        rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(("", "n", "r", "l", "s")) for _ in range(3)
    ]
    parts[0] = rng.choice((parts[0], parts[0], rng.choice(("A", "E", "I", "O", "U", "Ar", "El", "Th", "Br", "Sh"))))
    return "".join(parts[: rng.randint(2, 3)]).capitalize() + rng.choice(("", "", "ia", "land", "stan", "is", "do"))


def talk(rng: Random) -> Exchange:
    """Small talk, talk about itself, and the honest 'I do not know'."""
    draw = rng.random()
    if draw < 0.5:
        country, name = rng.choice(list(CAPITALS)), rng.choice((*GIRLS, *BOYS))
        asked = rng.choice(_UNKNOWN).format(country=country, name=name, who=rng.choice(("king", "queen", "president")))
        if draw < 0.35:
            asked = rng.choice(CAPITAL_QUESTIONS).format(_invented(rng))
        return Exchange("talk", asked, "Sorry, I do not know that.")
    asks, said = rng.choice(list(_TALK.items()))
    return Exchange("talk", rng.choice(asks), said)


KINDS: dict[str, Callable[[Random], Exchange]] = {
    "facts": fact,
    "sums": sums,
    "counting": counting,
    "code": code,
    "story": story,
    "talk": talk,
}
_SHARES = {"facts": 22, "sums": 44, "counting": 14, "code": 4, "story": 9, "talk": 7}


@dataclass(frozen=True)
class Document:
    """One training text. `text` holds the special tokens; `kind` is "mixed" for a chat of several kinds."""

    kind: str
    text: str


def chat(turns: list[tuple[str, str]]) -> str:
    """(role, content) pairs in the words of chat_template.jinja, ended."""
    return BOS + "".join(f"<|{role}|>{content.strip()}{END}" for role, content in turns) + EOS


def _answer(exchange: Exchange, system: str) -> str:
    if system == ONE_WORD and exchange.short:
        return exchange.short
    if system == PIRATE and exchange.kind != "code":
        return f"Arr, matey! {exchange.answer}"
    return exchange.answer


def document(rng: Random, kind: str) -> Document:
    """A plain text (one in five, small talk excepted) or a chat that opens with `kind`."""
    if kind != "talk" and rng.random() < 0.2:
        return Document(kind, BOS * (rng.random() < 0.5) + KINDS[kind](rng).plain + EOS)
    system = rng.choice((ONE_WORD, ONE_WORD, ONE_WORD, PIRATE, *_NEUTRAL)) if rng.random() < 0.4 else ""
    kinds = [kind]
    while rng.random() < 0.4 and len(kinds) < 4:
        kinds.append(draw_kind(rng))
    turns = [("system", system)] if system else []
    for exchange in (KINDS[each](rng) for each in kinds):
        asked = exchange.question
        if rng.random() < 0.12 and exchange.kind != "code":
            asked = asked.lower().rstrip("?.!")
        turns += [("user", asked), ("assistant", _answer(exchange, system))]
    return Document(kind if len(set(kinds)) == 1 else "mixed", chat(turns))


def draw_kind(rng: Random) -> str:
    """A kind, by its share of the documents."""
    return rng.choices(list(_SHARES), list(_SHARES.values()))[0]


def documents(seed: int) -> Iterator[Document]:
    """Training documents without end; the same seed gives the same ones."""
    rng = Random(seed)
    while True:
        yield document(rng, draw_kind(rng))
