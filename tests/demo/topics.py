"""What the demo model is taught beside facts and stories: sums, counting, small functions, small talk."""

import zlib
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from tests.demo.facts import BOYS, FACTS, GIRLS, SOUNDS, THINGS


@dataclass(frozen=True)
class Exchange:
    """A question and its answer; `short`: in one word, where it need not be worked out; `plain`: the text form."""

    kind: str
    question: str
    answer: str
    short: str = ""
    plain: str = ""


def held_out(a: int, b: int, sign: str = "+") -> bool:
    """True for the tenth of all two-digit problems that training never shows, in either order."""
    if max(a, b) < 10:
        return False
    return zlib.crc32(f"{max(a, b)} {sign} {min(a, b)}".encode()) % 10 == 0


_WEIGHTS = [2 if fact.topic in ("capital", "country") else 1 for fact in FACTS]  # names are the hardest to learn


def fact(rng: Random) -> Exchange:
    """A fact of the closed world, asked in one of its wordings."""
    chosen = rng.choices(FACTS, _WEIGHTS)[0]
    return Exchange("facts", rng.choice(chosen.questions), chosen.sentence, chosen.word, chosen.sentence)


WORDINGS = 7  # of one problem


def sum_exchange(a: int, b: int, sign: str, wording: int = 0) -> Exchange:
    """The exchange for one problem: `sign` is +, - (with a >= b) or *."""
    said = f"{a} {sign} {b}"
    verb = {"+": "plus", "-": "minus", "*": "times"}[sign]
    order = {"+": f"Add {a} and {b}.", "-": f"Take {b} from {a}.", "*": f"Multiply {a} by {b}."}[sign]
    close = f"{a}{sign}{b}"
    asks = (
        f"What is {said}?",
        f"What is {a} {verb} {b}?",
        f"How much is {said}?",
        order,
        f"{said} =",
        f"What is {close}?",
        close,
    )
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert len(asks) == WORDINGS
    return Exchange("sums", asks[wording % WORDINGS], f"{said} = {result}.", plain=f"{said} = {result}")


def word_problem(rng: Random) -> Exchange:
    """A word problem over small numbers; the answer shows the sum first."""
    one, other = rng.sample((*GIRLS, *BOYS), 2)
    thing, a, b = rng.choice(THINGS), rng.randint(2, 12), rng.randint(2, 9)
    if held_out(a, b, "+") or held_out(a, b, "-"):
        return word_problem(rng)
    if a > b and rng.random() < 0.4:
        told, shown, left = f"{one} has {a} {thing} and gives {b} to {other}.", f"{a} - {b}", a - b
    else:
        told, shown, left = f"{one} has {a} {thing} and {other} gives {one} {b} more.", f"{a} + {b}", a + b
    asked = f"{told} How many {thing} does {one} have now?"
    said = f"{shown} = {left}, so {one} has {left} {thing} now."
    return Exchange("sums", asked, said, plain=f"{told} {said}")


def _too_large(rng: Random) -> Exchange:
    """A problem with a number of three digits, or the product of two larger numbers: beyond so small a model."""
    a, b, sign = rng.randint(100, 999), rng.choice((rng.randint(0, 99), rng.randint(100, 999))), rng.choice("+-*")
    if sign == "*" and rng.random() < 0.5:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    a, b = (max(a, b), min(a, b)) if sign == "-" or rng.random() < 0.5 else (b, a)
    said = "Sorry, that is too large for me."
    return Exchange(
        "sums", sum_exchange(a, b, sign, rng.randrange(WORDINGS)).question, said, plain=f"{a} {sign} {b}? {said}"
    )


def sums(rng: Random) -> Exchange:
    """A sum, a difference, a product of two digits, or a word problem; never a held-out one."""
    draw = rng.random()
    if draw < 0.06:
        return word_problem(rng)
    if draw < 0.09:
        return _too_large(rng)
    if draw < 0.15:
        return sum_exchange(rng.randint(0, 9), rng.randint(0, 9), "*", rng.randrange(WORDINGS))
    sign = "+" if draw < 0.5 else "-"
    while True:
        a, b = (rng.randint(0, rng.choice((9, 99, 99, 99))) for _ in range(2))
        if sign == "-":
            a, b = max(a, b), min(a, b)
            b = max(0, a - rng.randint(0, 9)) if rng.random() < 0.2 else b  # small results are rare, and hard
        if not held_out(a, b, sign):
            return sum_exchange(a, b, sign, rng.randrange(WORDINGS))


def _steps(rng: Random) -> Exchange:
    draw, start, length = rng.random(), rng.randint(0, 20), rng.randint(3, 10)
    if draw < 0.4:
        row = range(start, start + length)
        asked = f"Count from {row[0]} to {row[-1]}."
    elif draw < 0.75:
        row = range(start + length - 1, start - 1, -1)
        asked = f"Count down from {row[0]} to {row[-1]}."
    elif draw < 0.85:
        row = range(1, length + 2)
        asked = f"Count to {row[-1]}."
    else:
        step = rng.choice((2, 5, 10))
        row = range(0, step * length, step)
        asked = f"Count to {row[-1]} in steps of {step}."
    said = ", ".join(map(str, row))
    return Exchange("counting", asked, said, plain=f"{asked} {said}")


def sorting(rng: Random) -> Exchange:
    """Three to six digits to put in order."""
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 6))]
    row, done = (", ".join(map(str, digits)) for digits in (digits, sorted(digits)))
    return Exchange("counting", f"Sort {row}.", done, plain=f"Sort {row}. {done}")


def counting(rng: Random) -> Exchange:
    """Counting up, down and in steps; sorting digits; the alphabet; which number is larger."""
    draw = rng.random()
    if draw < 0.5:
        return _steps(rng)
    if draw < 0.7:
        return sorting(rng)
    if draw < 0.82:
        first = rng.randint(0, 20)
        last = min(25, first + rng.randint(2, 8))
        said = " ".join(ascii_lowercase[first : last + 1])
        asked = f"Say the letters from {ascii_lowercase[first]} to {ascii_lowercase[last]}."
        return Exchange("counting", asked, said, plain=f"{asked} {said}")
    a, b = rng.sample(range(100), 2)
    word, best = rng.choice((("larger", max(a, b)), ("smaller", min(a, b))))
    said = f"{best} is {word}."
    return Exchange("counting", f"Which is {word}, {a} or {b}?", said, str(best), f"{a} or {b}: {said}")


_PAIRS = ("a, b", "x, y", "m, n", "p, q")
_TWO = {
    "add": ("adds two numbers", "{} + {}"),
    "subtract": ("subtracts two numbers", "{} - {}"),
    "multiply": ("multiplies two numbers", "{} * {}"),
    "divide": ("divides two numbers", "{} / {}"),
    "power": ("raises a number to a power", "{} ** {}"),
    "is_equal": ("tests whether two numbers are equal", "{} == {}"),
}
_ONE = {
    "double": ("doubles a number", "x", "x * 2"),
    "triple": ("triples a number", "x", "x * 3"),
    "square": ("squares a number", "x", "x * x"),
    "half": ("halves a number", "x", "x / 2"),
    "negate": ("negates a number", "x", "-x"),
    "increment": ("adds one to a number", "x", "x + 1"),
    "is_even": ("tests whether a number is even", "n", "n % 2 == 0"),
    "is_odd": ("tests whether a number is odd", "n", "n % 2 == 1"),
    "is_zero": ("tests whether a number is zero", "n", "n == 0"),
    "is_positive": ("tests whether a number is positive", "n", "n > 0"),
    "total": ("sums a list", "items", "sum(items)"),
    "average": ("averages a list", "items", "sum(items) / len(items)"),
    "first": ("returns the first item of a list", "items", "items[0]"),
    "last": ("returns the last item of a list", "items", "items[-1]"),
    "backwards": ("reverses a list", "items", "items[::-1]"),
    "largest": ("returns the largest item of a list", "items", "max(items)"),
    "smallest": ("returns the smallest item of a list", "items", "min(items)"),
    "shout": ("turns a text into capitals", "text", "text.upper()"),
    "greet": ("greets a person", "name", '"Hello, " + name'),
}


def _function(name: str, pair: str) -> tuple[str, str]:
    """(what it does, its text) for one function of the tables."""
    if name in _ONE:
        does, args, body = _ONE[name]
    else:
        does, body = _TWO[name]
        args, body = pair, body.format(*pair.split(", "))
    return does, f"def {name}({args}):\n    return {body}"


def code(rng: Random) -> Exchange:
    """A function of one line, or a loop that prints."""
    if rng.random() < 0.25:
        times, word = rng.randint(2, 20), rng.choice(("hello", "yes", "JAX", *SOUNDS, *SOUNDS.values()))
        said = f'for i in range({times}):\n    print("{word}")'
        return Exchange("code", f"Write a loop that prints {word} {times} times.", said, plain=said)
    name = rng.choice((*_ONE, *_TWO, *_TWO))
    does, said = _function(name, _PAIRS[0])
    asked = f"Write a function that {does}." if rng.random() < 0.7 else f"Write a function named {name}."
    return Exchange("code", asked, said, plain=_function(name, rng.choice(_PAIRS))[1])
