"""Word lists that the subtasks draw from, and the people and towns made from them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

FIRST_NAMES = (
    "Mara",
    "Tomas",
    "Elin",
    "Bruno",
    "Clara",
    "Viktor",
    "Nora",
    "Felix",
    "Iris",
    "Oskar",
    "Lena",
    "Hugo",
    "Sofia",
    "Anton",
    "Greta",
    "Pavel",
    "Alma",
    "Jonas",
    "Vera",
    "Milan",
    "Edith",
    "Ruben",
    "Selma",
    "Karl",
    "Tilda",
    "Emil",
    "Rosa",
    "Stefan",
    "Agnes",
    "Leo",
    "Wanda",
    "Igor",
)
SURNAME_HEADS = (
    "Lin",
    "Vel",
    "Ber",
    "Hol",
    "Nor",
    "Kas",
    "Mor",
    "Tal",
    "Rud",
    "Sten",
    "Fal",
    "Grim",
    "Ash",
    "Dal",
    "Wer",
    "Sund",
)
SURNAME_TAILS = ("den", "berg", "mann", "strom", "ova", "ner", "wick", "sen", "lund", "ries")
TOWN_HEADS = (
    "Tor",
    "Bran",
    "Mil",
    "Ost",
    "Kel",
    "Var",
    "Hest",
    "Lun",
    "Dor",
    "Sand",
    "Fen",
    "Ulm",
    "Ros",
    "Wen",
    "Hal",
    "Gren",
)
TOWN_TAILS = ("vik", "ford", "stad", "holm", "dale", "by", "mark", "haven", "ton", "beck")
JOBS = (
    "baker",
    "teacher",
    "sailor",
    "tailor",
    "painter",
    "farmer",
    "doctor",
    "carpenter",
    "miller",
    "printer",
    "gardener",
    "singer",
    "lawyer",
    "potter",
    "fisher",
    "smith",
)
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey", "orange", "purple")
# Singular and plural of things that can be owned, sold, counted.
THINGS = (
    ("boat", "boats"), ("lamp", "lamps"), ("clock", "clocks"), ("chair", "chairs"), ("drum", "drums"),
    ("kettle", "kettles"), ("mirror", "mirrors"), ("basket", "baskets"), ("carpet", "carpets"),
    ("violin", "violins"), ("ladder", "ladders"), ("bottle", "bottles"), ("hammer", "hammers"),
    ("apple", "apples"), ("engine", "engines"), ("umbrella", "umbrellas"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
BUILDINGS = ("museum", "library", "bridge", "tower", "market", "harbour", "school", "theatre")
FEATURES = ("rooms", "windows", "gates", "pillars", "lanterns", "benches", "stairs", "statues")


@dataclass(frozen=True)
class Person:
    """An invented person, with the attributes that questions ask for."""

    first: str
    surname: str
    town: str
    job: str
    year: int
    colour: str
    thing: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.surname}"

    @property
    def owned(self) -> str:
        return f"{self.colour} {self.thing}"


def surname(rng: Random) -> str:
    """One of 160 surnames."""
    return rng.choice(SURNAME_HEADS) + rng.choice(SURNAME_TAILS)


def full_name(rng: Random) -> str:
    """First name and surname."""
    return f"{rng.choice(FIRST_NAMES)} {surname(rng)}"


def town(rng: Random) -> str:
    """One of 160 towns."""
    return rng.choice(TOWN_HEADS) + rng.choice(TOWN_TAILS)


def towns(rng: Random, n: int) -> list[str]:
    """`n` different towns."""
    found: list[str] = []
    while len(found) < n:
        candidate = town(rng)
        if candidate not in found:
            found.append(candidate)
    return found


def people(rng: Random, n: int) -> list[Person]:
    """`n` people who differ in first name, town, job, year and owned thing."""
    firsts = rng.sample(FIRST_NAMES, n)
    places = towns(rng, n)
    jobs = rng.sample(JOBS, n)
    years = rng.sample(range(1940, 2000), n)
    things = rng.sample(THINGS, n)
    return [
        Person(firsts[i], surname(rng), places[i], jobs[i], years[i], rng.choice(COLOURS), things[i][0])
        for i in range(n)
    ]


def with_article(phrase: str) -> str:
    """The phrase with "a" or "an" before it, by its first letter; no word of the lists is an exception."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase
