"""Exercises that the training needs and no evaluation sees: repeating, recalling, looking up.

A small model takes long to find out, from the subtasks alone, that it can copy. These make it worth while: in
them hardly anything else can be told in advance.
"""

from __future__ import annotations

from random import Random

from hf_specdec.embedded.corpus import words
from hf_specdec.embedded.corpus.facts import Dialogue, introduction, passages_about, portrait
from hf_specdec.embedded.corpus.words import with_article


def _word(rng: Random) -> str:
    """Any word that texts of the corpus have to copy."""
    return rng.choice(
        (
            lambda: rng.choice(words.FIRST_NAMES),
            lambda: words.surname(rng),
            lambda: words.town(rng),
            lambda: str(rng.randrange(1700, 2000)),
            lambda: rng.choice(words.JOBS),
            lambda: rng.choice(words.COLOURS),
            lambda: rng.choice(words.THINGS)[0],
            lambda: str(rng.randrange(10, 99)),
        )
    )()


def echo(rng: Random) -> Dialogue:
    """A row of words, to be said again three times."""
    said = "It is " + " ".join(_word(rng) for _ in range(rng.randrange(6, 20))) + "."
    return (f"Repeat. {said}", "Again.", "Again."), (said, said, said)


def recall(rng: Random) -> Dialogue:
    """Pairs of words; for the first of each pair the second is asked."""
    pairs, turns = _pairs_and_turns(rng)
    return turns, tuple(f"It is {value}." for _, value in pairs)


def recall_fully(rng: Random) -> Dialogue:
    """`recall`, the answers in whole sentences: easier, as the answer's own words lead to the place."""
    pairs, turns = _pairs_and_turns(rng)
    return turns, tuple(f"For {key} it is {value}." for key, value in pairs)


def _pairs_and_turns(rng: Random) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Three to eight pairs in the order of the questions, and the turns that state and ask them."""
    n = rng.randrange(3, 9)
    keys = {_word(rng): _word(rng) for _ in range(n)}
    pairs = list(keys.items())
    context = " ".join(f"For {key} it is {value}." for key, value in pairs)
    rng.shuffle(pairs)
    turns = [f"For {key}?" for key, _ in pairs]
    return pairs, (f"Listen. {context} {turns[0]}", *turns[1:])


Question = tuple[str, str, str]  # the question, the short answer, the answer in a whole sentence


def _about_people(rng: Random) -> tuple[str, list[Question]]:
    """Two or three people, and every short question about them."""
    cast = words.people(rng, rng.choice((2, 3)))
    portrayed = rng.random() < 0.5
    context = " ".join(portrait(rng, p) if portrayed else introduction(p) for p in cast)
    questions = [
        question
        for p in cast
        for question in (
            (f"Who owns the {p.thing}?", p.name, f"The {p.thing} belongs to {p.name}."),
            (f"Who comes from {p.town}?", p.name, f"From {p.town} comes {p.name}."),
            (f"Who was born in {p.year}?", p.name, f"In {p.year} was born {p.name}."),
            (f"What is the home of {p.name}?", p.town, f"{p.name} lives in {p.town}."),
            (f"What is the job of {p.name}?", with_article(p.job), f"{p.name} works as {with_article(p.job)}."),
            (f"What is the birth year of {p.name}?", str(p.year), f"{p.name} was born in {p.year}."),
            (f"What is the property of {p.name}?", with_article(p.owned), f"{p.name} owns {with_article(p.owned)}."),
        )
    ]
    return ("Read the text and answer. " if portrayed else "Listen. ") + context, questions


def _about_passages(rng: Random) -> tuple[str, list[Question]]:
    """Two to four passages, and every short question about them."""
    passages = passages_about(rng, rng.choice((2, 3, 4)))
    questions = []
    for p in passages:
        source, subject = f"passage [{p.number}]", p.subject
        questions += [
            (f"Which passage describes the {subject}?", source, f"The {subject} is described in {source}."),
            (f"Who built the {subject}?", p.builder, f"The {subject} was built by {p.builder}."),
            (f"In which year was the {subject} built?", str(p.year), f"The {subject} was built in {p.year}."),
            (f"What does the {subject} have?", p.equipment, f"The {subject} has {p.equipment}."),
        ]
    return f"Use the passages. {' '.join(map(str, passages))}", questions


def look_up(rng: Random) -> Dialogue:
    """Up to eight short questions about one context of the subtasks that look facts up."""
    turns, chosen = _questions_and_turns(rng)
    return turns, tuple(f"It is {short}." for _, short, _ in chosen)


def look_up_fully(rng: Random) -> Dialogue:
    """`look_up`, the answers in whole sentences, as the subtasks want them."""
    turns, chosen = _questions_and_turns(rng)
    return turns, tuple(sentence for _, _, sentence in chosen)


def _questions_and_turns(rng: Random) -> tuple[tuple[str, ...], list[Question]]:
    """The turns that give a context and ask about it, and the questions with their answers."""
    context, questions = rng.choice((_about_people, _about_people, _about_passages))(rng)
    chosen = rng.sample(questions, min(8, len(questions)))
    turns = [question for question, _, _ in chosen]
    return (f"{context} {turns[0]}", *turns[1:]), chosen


DRILLS = {
    "echo": echo,
    "recall": recall,
    "recall fully": recall_fully,
    "look up": look_up,
    "look up fully": look_up_fully,
}
