"""Subtasks that rewrite: summarization, translation and grammar correction."""

from __future__ import annotations

from random import Random

from hf_specdec.embedded.corpus import language, words
from hf_specdec.embedded.corpus.facts import Dialogue
from hf_specdec.embedded.corpus.words import with_article

_TASKS = ["repair", "sell", "paint", "move", "clean", "weigh"]
_TOPICS = ("the weather", "the old road", "the harvest", "the new bridge", "the price of bread", "the feast")


def summarization(rng: Random) -> Dialogue:
    """Minutes of a meeting; the summary counts the promises and repeats them, and leaves out the rest."""
    place, chair = words.town(rng), words.full_name(rng)
    n_tasks, n_talks = rng.choice(((2, 2), (2, 1), (3, 1), (1, 3), (1, 2), (3, 2)))
    names = rng.sample(words.FIRST_NAMES, n_tasks + n_talks)
    lines: list[tuple[str, str]] = []
    for name in names[:n_tasks]:
        job, thing, day = rng.choice(_TASKS), rng.choice(words.THINGS)[0], rng.choice(words.DAYS)
        thing = f"{rng.choice(words.COLOURS)} {thing}"
        promise = rng.choice(("agreed to", "promised to", "offered to"))
        lines.append((f"{name} {promise} {job} the {thing} before {day}.",
                      f"{name} will {job} the {thing} by {day}"))  # fmt: skip
    for name in names[n_tasks:]:
        lines.append((f"{name} {rng.choice(('talked about', 'complained about'))} {rng.choice(_TOPICS)}.", ""))
    rng.shuffle(lines)
    minutes = " ".join(line for line, _ in lines)
    kept = "; ".join(short for _, short in lines if short)
    count = "1 task was" if n_tasks == 1 else f"{n_tasks} tasks were"
    return (
        (f"Summarize the minutes. {chair} opened the meeting in {place}. {minutes}",),
        (f"{chair} led the meeting in {place}. In the meeting {count} given out: {kept}.",),
    )


_NOTE = "The first verb is in the {}, the second verb is in the {}."


def translation(rng: Random) -> Dialogue:
    """An English sentence of two clauses, to be translated into Velan."""
    english, velan, tenses = language.sentence(rng)
    ask = rng.choice(("Translate into Velan:", "Say in Velan:", "What is this in Velan?"))
    return (f"{ask} {english}",), (f"In Velan: {velan} {_NOTE.format(*tenses)}",)


Word = tuple[str, str, str]  # correct form, wrong form, kind of error; the last two are empty for words without one


def _thing(rng: Random) -> list[Word]:
    """A noun phrase for an object."""
    thing, plural = rng.choice(words.THINGS)
    colour = rng.choice((*words.COLOURS, "old"))
    if rng.random() < 0.5:
        article = with_article(colour).split()[0]
        return [(article, "a" if article == "an" else "an", "article"), (colour, "", ""), (thing, "", "")]
    return [(rng.choice(("two", "three", "many")), "", ""), (colour, "", ""), (plural, thing, "number")]


def _clause(rng: Random) -> list[Word]:
    """A clause with one or two objects."""
    place = words.town(rng)
    if rng.random() < 0.5:
        subject = [(rng.choice(words.FIRST_NAMES), "", "")]
        many = False
    else:
        job = rng.choice(words.JOBS)
        many = rng.random() < 0.5
        subject = [("the", "the the", "repetition"), (job + "s" if many else job, "", "")]
    base, past = rng.choice((("paint", "painted"), ("need", "needed"), ("repair", "repaired"),
                             ("clean", "cleaned"), ("want", "wanted"), ("collect", "collected")))  # fmt: skip
    if rng.random() < 0.4:
        time, verb = [("yesterday", "", "")], (past, base if many else base + "s", "tense")
    else:
        right, wrong = (base, base + "s") if many else (base + "s", base)
        time, verb = [], (right, wrong, "agreement")
    more = [("and", "", ""), *_thing(rng)] if rng.random() < 0.5 else []
    return [*time, *subject, verb, *_thing(rng), *more, ("in", "in in", "repetition"), (place, "", "")]


_ERRORS = "In the sentence {} found: {}."


def grammar_correction(rng: Random) -> Dialogue:
    """Two clauses with one to three errors; the answer corrects the sentence and names the kinds of error in order."""
    joint = rng.choice(("and", "but", "because", "while"))
    tokens = [*_clause(rng), (",", "", ""), (joint, "", ""), *_clause(rng)]
    candidates = [i for i, (_, _, kind) in enumerate(tokens) if kind]
    broken = set(rng.sample(candidates, rng.randrange(1, 4)))
    wrong = " ".join(bad if i in broken else good for i, (good, bad, _) in enumerate(tokens))
    right = " ".join(good for good, _, _ in tokens)
    wrong, right = (s.replace(" ,", ",") for s in (wrong, right))
    kinds = ", then ".join(tokens[i][2] for i in sorted(broken))
    count = "1 error was" if len(broken) == 1 else f"{len(broken)} errors were"
    capital = (right[0].upper() + right[1:], wrong[0].upper() + wrong[1:])
    ask = rng.choice(("Correct the grammar:", "Fix the errors:", "Improve this sentence:"))
    return (f"{ask} {capital[1]}.",), (f"Corrected: {capital[0]}. {_ERRORS.format(count, kinds)}",)
