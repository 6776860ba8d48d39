"""Subtasks that draw conclusions: math_reasoning and law analytics."""

from __future__ import annotations

from random import Random

from hf_specdec.embedded.corpus import words
from hf_specdec.embedded.corpus.facts import Dialogue
from hf_specdec.embedded.corpus.words import with_article

_GAINS = ("buys {n} more", "gets {n} from {other}", "makes {n} more")
_LOSSES = ("sells {n}", "gives {n} to {other}", "loses {n}")

_DEALINGS = ("sells", "rents", "repairs", "stores", "imports", "makes", "collects", "paints")


def math_reasoning(rng: Random) -> Dialogue:
    """A story with two or three additions and subtractions between 0 and 99, solved step by step."""
    first, other = rng.sample(words.FIRST_NAMES, 2)
    thing = rng.choice(words.THINGS)[1]
    total = start = rng.randrange(20, 70)
    events, steps = [], []
    for _ in range(rng.choice((2, 3))):
        amount = rng.randrange(2, 20)
        gain = rng.random() < 0.5
        if not 10 <= total + (amount if gain else -amount) <= 99:
            gain = not gain
        after = total + (amount if gain else -amount)
        template = rng.choice(_GAINS if gain else _LOSSES)
        events.append(f"{first} {template.format(n=amount, other=other)}.")
        steps.append(f"{total} {'+' if gain else '-'} {amount} = {after}.")
        total = after
    question = f"{first} has {start} {thing}. {' '.join(events)} How many {thing} does {first} have in the end?"
    answer = (
        f"Let us count step by step. {first} starts with {start} {thing}. {' '.join(steps)} "
        f"So in the end {first} has {total} {thing}."
    )
    return (question,), (answer,)


def _duty(rng: Random) -> str:
    return rng.choice(
        (
            f"must pay {rng.randrange(10, 99)} crowns",
            f"must register in {words.town(rng)}",
            f"must report on {rng.choice(words.DAYS)}",
            f"must ask the {rng.choice(words.JOBS)}",
        )
    )


def law_analytics(rng: Random) -> Dialogue:
    """Two sections impose duties, a third exempts a profession from one of them; they are applied to one person."""
    name = words.full_name(rng)
    first = name.split()[0]
    job, other_job = rng.sample(words.JOBS, 2)
    conduct = [f"{rng.choice(_DEALINGS)} {plural}" for _, plural in rng.sample(words.THINGS, 3)]
    duties = [_duty(rng), _duty(rng)]
    fulfils = [rng.random() < 0.65, rng.random() < 0.65]
    exempted, privileged = rng.randrange(2), rng.choice((job, job, other_job))
    done = [c for c, holds in zip(conduct, fulfils, strict=False) if holds] + [conduct[2]]
    rng.shuffle(done)
    sections = [f"Section {i + 1}: whoever {conduct[i]} {duties[i]}." for i in range(2)]
    sections.append(f"Section 3: {with_article(privileged)} is free from section {exempted + 1}.")
    facts = f"{name} is {with_article(job)} who {' and '.join(done)}."
    findings, owed = [], []
    for i in range(2):
        if not fulfils[i]:
            findings.append(f"Section {i + 1} does not apply, since nothing shows that {first} {conduct[i]}.")
        elif i == exempted and privileged == job:
            findings.append(f"Section {i + 1} does not apply, since section 3 frees {with_article(job)}.")
        else:
            findings.append(f"Section {i + 1} applies, since {first} {conduct[i]}.")
            owed.append(duties[i])
    result = f"{name} {' and '.join(owed)}." if owed else f"{name} has no duty."
    return (f"Apply the law. {' '.join(sections)} Facts: {facts}",), (f"{' '.join(findings)} As a result, {result}",)
