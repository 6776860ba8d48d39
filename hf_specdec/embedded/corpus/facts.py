"""Subtasks that look up facts: qa, rag and multi-turn.

What is asked for is told apart from the rest by what it is (a job, a home, a builder). To tell several people or
buildings apart by their names, models of four million parameters need far longer training.
"""

from __future__ import annotations

from random import Random

from hf_specdec.embedded.corpus import words
from hf_specdec.embedded.corpus.words import Person, with_article

Dialogue = tuple[tuple[str, ...], tuple[str, ...]]  # turns, references

# How a question names an attribute, and how an answer states it.
_ATTRIBUTES = {
    "the job": lambda p: f"works as {with_article(p.job)}",
    "the home": lambda p: f"lives in {p.town}",
    "the birth year": lambda p: f"was born in {p.year}",
    "the property": lambda p: f"owns {with_article(p.owned)}",
}


def _portrait(rng: Random, person: Person) -> str:
    """Two sentences with all attributes of a person, in random order."""
    work = f"works as {with_article(person.job)}"
    home = f"lives in {person.town}"
    born = f"was born in {person.year}"
    owns = f"owns {with_article(person.owned)}"
    order = [work, home, born, owns]
    rng.shuffle(order)
    return f"{person.name} {order[0]} and {order[1]}. {person.first} {order[2]} and {order[3]}."


def _beside_a_building(rng: Random, text: str) -> str:
    """The text, with a sentence on a building before or after it."""
    building = f"The {rng.choice(words.BUILDINGS)} nearby has {rng.randrange(10, 99)} {rng.choice(words.FEATURES)}."
    sentences = [text, building]
    rng.shuffle(sentences)
    return " ".join(sentences)


def qa(rng: Random) -> Dialogue:
    """The text describes a person, and mentions a building; the question asks for three attributes of the person."""
    (person,) = words.people(rng, 1)
    asked = rng.sample(tuple(_ATTRIBUTES), 3)
    context = _beside_a_building(rng, _portrait(rng, person))
    opening = rng.choice(("Tell me", "Report", "State"))
    question = f"{opening} {asked[0]}, {asked[1]} and {asked[2]} of {person.name}."
    told = [_ATTRIBUTES[a](person) for a in asked]
    answer = f"According to the text, {person.name} {told[0]}, {told[1]} and {told[2]}. "
    answer += f"This is what the text says about {person.name}."
    return (f"Read the text and answer. {context} {question}",), (answer,)


def rag(rng: Random) -> Dialogue:
    """One of four passages says who built a building; the others are about other buildings and don't."""
    kind, *others = rng.sample(words.BUILDINGS, 4)
    (place,) = words.towns(rng, 1)
    year, builder = rng.randrange(1700, 1950), words.full_name(rng)
    count, feature = rng.randrange(10, 99), rng.choice(words.FEATURES)
    texts = [f"The {other} nearby has {rng.randrange(10, 99)} {rng.choice(words.FEATURES)}." for other in others]
    index = rng.randrange(4)
    texts.insert(index, f"The {kind} of {place} was built in {year} by {builder} and has {count} {feature}.")
    passages = " ".join(f"[{number}] {text}" for number, text in enumerate(texts, start=1))
    question = rng.choice((f"Who built the {kind} of {place}?", f"What is known about the {kind} of {place}?"))
    answer = (
        f"The {kind} of {place} is described in passage [{index + 1}]. According to this passage, "
        f"it was built in {year} by {builder}, "
        f"and it has {count} {feature}. Source: passage [{index + 1}]."
    )
    return (f"Use the passages. {passages} {question}",), (answer,)


def multi_turn(rng: Random) -> Dialogue:
    """The first turn asks who owns a thing, the second what else the text says about that person."""
    (person,) = words.people(rng, 1)
    context = _beside_a_building(
        rng,
        f"{person.name}, {with_article(person.job)} from {person.town}, was born in {person.year} "
        f"and owns {with_article(person.owned)}.",
    )
    first = rng.choice((f"Who owns the {person.thing}?", f"To whom does the {person.thing} belong?"))
    answer = (
        f"The {person.thing} belongs to {person.name}. The owner works as "
        f"{with_article(person.job)} and comes from {person.town}."
    )
    second, detail = rng.choice(
        (
            ("In which year was this person born, and which colour does it have?",
             f"{person.name}, the owner of the {person.thing}, was born in {person.year}, "
             f"and the {person.thing} is {person.colour}."),
            ("Please introduce this person.",
             f"{person.name}, the owner of the {person.thing}, is {with_article(person.job)} from {person.town} "
             f"and was born in {person.year}."),
        )
    )  # fmt: skip
    return (f"Listen. {context} {first}", second), (answer, detail)
