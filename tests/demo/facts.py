"""The closed world the demo model knows: tables of facts, and the questions that ask for them."""

from dataclasses import dataclass

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Bulgaria": "Sofia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Mongolia": "Ulaanbaatar",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Nigeria": "Abuja",
    "Norway": "Oslo",
    "Pakistan": "Islamabad",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Senegal": "Dakar",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "the United States": "Washington",
    "Vietnam": "Hanoi",
}
COLOURS = {
    "a banana": "yellow",
    "a lemon": "yellow",
    "a strawberry": "red",
    "a fire engine": "red",
    "a tomato": "red",
    "a carrot": "orange",
    "a pumpkin": "orange",
    "a frog": "green",
    "a cucumber": "green",
    "grass": "green",
    "the sky": "blue",
    "the sea": "blue",
    "snow": "white",
    "milk": "white",
    "a swan": "white",
    "coal": "black",
    "a raven": "black",
    "chocolate": "brown",
    "an elephant": "grey",
    "a flamingo": "pink",
    "a plum": "purple",
}
OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("happy", "sad"),
    ("fast", "slow"),
    ("day", "night"),
    ("up", "down"),
    ("left", "right"),
    ("open", "closed"),
    ("light", "dark"),
    ("full", "empty"),
    ("old", "young"),
    ("rich", "poor"),
    ("hard", "soft"),
    ("wet", "dry"),
    ("early", "late"),
    ("loud", "quiet"),
    ("strong", "weak"),
    ("long", "short"),
    ("high", "low"),
    ("first", "last"),
    ("clean", "dirty"),
    ("push", "pull"),
]
SOUNDS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "lion": "roar",
    "owl": "hoot",
    "frog": "croak",
    "bee": "buzz",
    "snake": "hiss",
    "mouse": "squeak",
    "rooster": "cock-a-doodle-doo",
}
YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "sheep": "lamb",
    "horse": "foal",
    "hen": "chick",
    "duck": "duckling",
    "goat": "kid",
    "bear": "cub",
    "frog": "tadpole",
    "swan": "cygnet",
    "kangaroo": "joey",
    "owl": "owlet",
    "pig": "piglet",
}
LEGS = {
    "spider": "eight",
    "dog": "four",
    "cat": "four",
    "horse": "four",
    "bee": "six",
    "ant": "six",
    "duck": "two",
    "hen": "two",
    "snake": "no",
    "fish": "no",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
GIRLS = ("Mia", "Anna", "Lucy", "Rosa", "Ella", "Ruby")
BOYS = ("Tom", "Ben", "Max", "Leo", "Sam", "Oscar")
THINGS = ("apples", "balls", "books", "shells", "nuts", "coins", "cakes", "stars")
CAPITAL_QUESTIONS = ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.")


@dataclass(frozen=True)
class Fact:
    """One thing to know: `word` answers each of `questions`, and `sentence` says it in full."""

    topic: str
    questions: tuple[str, ...]
    sentence: str
    word: str


def _capitals() -> list[Fact]:
    facts = []
    for country, city in CAPITALS.items():
        asks = tuple(ask.format(country) for ask in CAPITAL_QUESTIONS)
        facts.append(Fact("capital", asks, f"The capital of {country} is {city}.", city))
        asks = ("{} is the capital of which country?", "Which country has the capital {}?")
        said = f"{city} is the capital of {country}."
        facts.append(Fact("country", tuple(ask.format(city) for ask in asks), said, country))
    return facts


def _animals() -> list[Fact]:
    facts = []
    for animal, sound in SOUNDS.items():
        asks = (f"What does the {animal} say?", f"What sound does a {animal} make?")
        facts.append(Fact("sound", asks, f"The {animal} says {sound}.", sound))
    for animal, young in YOUNG.items():
        article = "an" if young[0] in "aeiou" else "a"
        asks = (f"What is a baby {animal} called?", f"What do you call a young {animal}?")
        facts.append(Fact("young", asks, f"A baby {animal} is called {article} {young}.", young))
    for animal, legs in LEGS.items():
        article = "an" if animal[0] in "aeiou" else "a"
        asks = (f"How many legs does {article} {animal} have?", f"How many legs has {article} {animal} got?")
        facts.append(Fact("legs", asks, f"{article.capitalize()} {animal} has {legs} legs.", legs))
    return facts


def _words() -> list[Fact]:
    facts = []
    for thing, colour in COLOURS.items():
        asks = (f"What colour is {thing}?", f"Which colour does {thing} have?")
        facts.append(Fact("colour", asks, f"{thing[0].upper()}{thing[1:]} is {colour}.", colour))
    for pair in OPPOSITES:
        for one, other in (pair, pair[::-1]):
            asks = (f"What is the opposite of {one}?", f"Tell me the opposite of {one}.")
            facts.append(Fact("opposite", asks, f"The opposite of {one} is {other}.", other))
    return facts


def _calendar() -> list[Fact]:
    facts = []
    for unit, names in (("day", DAYS), ("month", MONTHS)):
        for one, other in zip(names, names[1:] + names[:1], strict=True):
            asks = (f"Which {unit} comes after {one}?", f"What {unit} follows {one}?")
            facts.append(Fact(unit, asks, f"{other} comes after {one}.", other))
            asks = (f"Which {unit} comes before {other}?", f"What is the {unit} before {other}?")
            facts.append(Fact(unit, asks, f"{one} comes before {other}.", one))
    return facts


FACTS: tuple[Fact, ...] = (*_capitals(), *_animals(), *_words(), *_calendar())
