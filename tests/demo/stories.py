"""Very short stories from a grammar that keeps names, pronouns and things straight."""

from dataclasses import dataclass
from random import Random

from tests.demo.facts import BOYS, GIRLS
from tests.demo.topics import Exchange

ANIMALS = ("fox", "bear", "owl", "mouse", "cat", "dog", "frog", "duck", "rabbit", "hedgehog")
PLACES = ("in a quiet forest", "near a river", "on a green hill", "by the sea", "in an old barn", "under a tall tree")
THINGS = ("red ball", "blue kite", "golden key", "silver bell", "yellow hat", "green boat", "small drum")
FOODS = ("apple cake", "berry pie", "honey bread", "carrot soup", "nut cookies")


@dataclass(frozen=True)
class Someone:
    """A character: an animal with a name and the pronouns that go with it."""

    name: str
    animal: str
    she: str
    her: str

    @classmethod
    def draw(cls, rng: Random, other: "Someone | None" = None) -> "Someone":
        """A character; one who meets `other` is of another kind, and a girl meets a boy: nobody is mixed up."""
        girl = rng.random() < 0.5 if other is None else other.she == "he"
        animal = rng.choice([animal for animal in ANIMALS if other is None or animal != other.animal])
        return cls(rng.choice(GIRLS if girl else BOYS), animal, "she" if girl else "he", "her" if girl else "his")

    @property
    def She(self) -> str:
        """The pronoun at the start of a sentence."""
        return self.she.capitalize()

    @property
    def the(self) -> str:
        """Name and kind, as in 'Tom the owl'."""
        return f"{self.name} the {self.animal}"


def _lost(rng: Random, a: Someone, b: Someone) -> tuple[str, str]:
    thing = rng.choice(THINGS)
    return f"a {thing}", (
        f"One day {a.name} found a {thing}. {b.the} was sad, because {b.she} had lost {b.her} {thing}. "
        f"{a.name} gave the {thing} to {b.name}, and {b.name} was happy again."
    )


def _race(rng: Random, a: Someone, b: Someone) -> tuple[str, str]:
    return "a race", (
        f"One day {a.name} ran a race with {b.the}. {b.name} was fast, but {b.she} stopped to sleep. "
        f"{a.name} was slow, but {a.she} did not stop. So {a.name} won the race."
    )


def _food(rng: Random, a: Someone, b: Someone) -> tuple[str, str]:
    food = rng.choice(FOODS)
    return food, (
        f"One day {a.name} made {food}. {b.the} came to {a.her} door. "
        f'"May I have some {food}?" asked {b.name}. "Yes, please," said {a.name}. They ate it all.'
    )


def _storm(rng: Random, a: Someone, b: Someone) -> tuple[str, str]:
    weather = rng.choice(("rain", "snow", "wind"))
    return f"the {weather}", (
        f"One night the {weather} was strong, and {a.name} could not find {a.her} home. "
        f'"Come in," said {b.the}. {a.name} slept in the house of {b.name} until the {weather} was over.'
    )


def _seed(rng: Random, a: Someone, b: Someone) -> tuple[str, str]:
    plant = rng.choice(("flower", "pumpkin", "tree"))
    return f"a {plant}", (
        f"One day {a.name} put a seed in the ground. {b.the} gave it water. Soon a big {plant} grew there. "
        f'"It is our {plant}," said {a.name}, and {b.name} smiled.'
    )


def story(rng: Random) -> Exchange:
    """A story about one animal that meets another; the question may name the animal, its name, and the theme."""
    hero = Someone.draw(rng)
    friend = Someone.draw(rng, hero)
    mood = rng.choice(("little", "brave", "clever", "shy", "kind"))
    opening = (
        f"Once upon a time there was a {mood} {hero.animal} named {hero.name}. {hero.She} lived {rng.choice(PLACES)}."
    )
    theme, plot = rng.choice((_lost, _race, _food, _storm, _seed))(rng, hero, friend)
    animal = f"{'an' if hero.animal[0] in 'aeiou' else 'a'} {hero.animal}"
    about = rng.choice(("", animal, theme, f"{animal} named {hero.name}", f"{animal} and {theme}"))
    told = f"{opening} {plot} {hero.name} and {friend.name} were friends from that day on. The end."
    return Exchange("story", f"Tell me a story about {about}." if about else "Tell me a story.", told, plain=told)
