"""Velan, an invented language: its lexicon, inflection and word order, and sentences to translate.

Word order is place, object, verb, subject (English: subject, verb, object, place). An adjective follows its noun. It
ends in `-a` after a noun that ends in a vowel, otherwise in `-os`. Suffixes: plural `-ki`, object `-n` (after the
plural), past `-ta`, future `-mo`. "near the X" is `X-lo`. There are no articles, and names stay as they are. `ve` means
"and", `nal` means "but".
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from hf_specdec.embedded.corpus.words import FIRST_NAMES, with_article

NOUNS = {
    "baker": "pamu", "teacher": "dosil", "sailor": "nareg", "farmer": "tulob", "doctor": "mizek",
    "boat": "sorat", "lamp": "lidu", "clock": "teken", "basket": "korim", "apple": "jabo",
    "drum": "bondu", "bottle": "figas", "river": "wesil", "tower": "gorat", "bridge": "pondu",
    "market": "hazim",
}  # fmt: skip
PEOPLE, OBJECTS, PLACES = tuple(NOUNS)[:5], tuple(NOUNS)[5:12], tuple(NOUNS)[12:]
ADJECTIVES = {
    "old": "gam", "red": "ruf", "small": "pik", "heavy": "dur", "new": "nis", "cheap": "bil",
    "quiet": "sul", "green": "zel",
}  # fmt: skip
# English present, past, base form (after "will"), and the Velan stem.
VERBS = (
    ("sees", "saw", "see", "vid"), ("buys", "bought", "buy", "kom"), ("sells", "sold", "sell", "ven"),
    ("finds", "found", "find", "tro"), ("repairs", "repaired", "repair", "rip"),
    ("carries", "carried", "carry", "por"), ("paints", "painted", "paint", "far"),
    ("hides", "hid", "hide", "kav"),
)  # fmt: skip
NUMERALS = {"two": "du", "three": "ter", "four": "kar"}


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in both languages; `velan_noun` has no case suffix, `velan_after` is what follows it."""

    english: str
    velan_noun: str
    velan_after: str

    def velan(self, suffix: str = "") -> str:
        return self.velan_noun + suffix + self.velan_after


def _noun_phrase(rng: Random, nouns: tuple[str, ...], countable: bool) -> Phrase:
    noun, adjective = rng.choice(nouns), rng.choice((*ADJECTIVES, None, None))
    described = f"{adjective} {noun}" if adjective else noun
    agreement = "a" if NOUNS[noun][-1] in "aeiou" else "os"
    after = f" {ADJECTIVES[adjective]}{agreement}" if adjective else ""
    if countable and rng.random() < 0.4:
        numeral = rng.choice(tuple(NUMERALS))
        return Phrase(f"{numeral} {described}s", NOUNS[noun] + "ki", f"{after} {NUMERALS[numeral]}")
    article = rng.choice(("the " + described, with_article(described)))
    return Phrase(article, NOUNS[noun], after)


def _clause(rng: Random) -> tuple[str, str, str]:
    """A clause in English and in Velan, without capital and full stop, and its tense."""
    if rng.random() < 0.4:
        name = rng.choice(FIRST_NAMES)
        subject = Phrase(name, name, "")
    else:
        subject = _noun_phrase(rng, PEOPLE, countable=False)
    thing, place = _noun_phrase(rng, OBJECTS, countable=True), _noun_phrase(rng, PLACES, countable=False)
    present, past, base, stem = rng.choice(VERBS)
    verb, ending, tense = rng.choice(((present, "", "present"), (past, "ta", "past"), (f"will {base}", "mo", "future")))
    near = rng.random() < 0.6
    english = f"{subject.english} {verb} {thing.english}" + (f" near {place.english}" if near else "")
    velan = (f"{place.velan('lo')} " if near else "") + thing.velan("n")
    return english, f"{velan} {stem}{ending} {subject.velan()}", tense


def sentence(rng: Random) -> tuple[str, str, tuple[str, str]]:
    """An English sentence of two clauses, its only correct Velan translation, and the two tenses."""
    (first, first_velan, tense), (second, second_velan, other_tense) = _clause(rng), _clause(rng)
    english, velan = rng.choice((("and", "ve"), ("but", "nal")))
    return (
        f"{first[0].upper()}{first[1:]}, {english} {second}.",
        f"{first_velan[0].upper()}{first_velan[1:]}, {velan} {second_velan}.",
        (tense, other_tense),
    )
