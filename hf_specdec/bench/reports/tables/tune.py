"""Tables of the task tune, and its choice in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.bootstrap import ENOUGH, Interval
from hf_specdec.bench.figures.races import deciding_race
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports import other_engines
from hf_specdec.bench.reports.best_settings import at_the_edge, command, keywords
from hf_specdec.bench.reports.heading import heading
from hf_specdec.bench.reports.markdown import capital, difference, number, ratio, table

Tuned = Mapping[str, Any]

LEGEND = (
    "Speedups are over plain generate() on the same prompts, end to end: the prompt's pass counts, compiling and other "
    "preparation does not. In brackets: 95% interval, by a paired bootstrap over examples and repeats, widened for few "
    f"examples (expanded percentiles, Hesterberg 2015); there is none below {ENOUGH} examples. Stage: the last "
    "one that a candidate was measured in, of successive halving; figures of different stages rest on different "
    "examples. The fastest candidate is chosen on the calls that it is measured on, which flatters it a little. A "
    "lossy one is chosen only if a loss greater than allowed is excluded, even if one further question lost all 100."
)
_ENGINES = "## Other engines\n\n"


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), LEGEND]
    for tuned in result["tuned"]:
        parts.append(f"## Batch size {tuned['batch']}")
        parts.append("\n".join(f"- {line}" for line in [*choice(result, tuned), *tuned["notes"]]))
        parts.append(_candidates(result, tuned))
    if lines := for_other_engines(result):
        parts.append(_ENGINES + "\n\n".join(lines))
    parts += [f"- {line}" for line in _remarks(result)]
    return "\n\n".join(parts).strip() + "\n"


def terminal(result: Result, stem: Path) -> str:
    """The choices, the commands for other engines, and where the files are."""
    lines = []
    for tuned in result["tuned"]:
        lines += [f"Batch size {tuned['batch']}", *(f"- {line}" for line in choice(result, tuned))]
        if tuned["choice"] is not None:
            lines.append(f"- To save with the model: {stem}-batch-{tuned['batch']}/generation_config.json")
        lines += [f"- {note}" for note in tuned["notes"]]
    lines += for_other_engines(result)
    return "\n".join([*lines, *_remarks(result), f"All that was tried: {stem}.md"]) + "\n"


def choice(result: Result, tuned: Tuned) -> list[str]:
    """The choice, its settings, its cost of preparation, and what was as fast; or why there is none."""
    return [*_outcome(result, tuned), *_uncounted(tuned)]


def _outcome(result: Result, tuned: Tuned) -> list[str]:
    """By the race that decides."""
    if tuned["choice"] is None:
        best = next(iter(last_ratios(tuned).items()), None)
        if best is None:
            return ["There is no choice: nothing but plain generate() could be measured. Raise --minutes."]
        fastest = f"{speed.method_named(result, best[0])['title']}, {ratio(best[1])} times plain generate()"
        if best[1].low is None:
            return [f"{_too_few(result, tuned)} Fastest so far, on too few: {fastest}."]
        words = "Plain generate() is best: nothing else is surely faster at an allowed loss"
        return [f"{words}. Fastest of the others: {fastest}."]
    method = speed.method_named(result, tuned["choice"])
    gain = last_ratios(tuned)[tuned["choice"]]
    lines = [f"{capital(method['title'])}: {ratio(gain)} times plain generate(), end to end."]
    if method["kind"] == "none":
        lines.append("Drafting does not pay here: this is plain decoding on a faster engine.")
    if loss := tuned["losses"].get(tuned["choice"]):
        lines.append(f"Difference in quality to plain decoding, in points: {difference(Interval(*loss))}.")
    batch = "" if tuned["batch"] == 1 else f" --batch_size {tuned['batch']}"
    lines.append(f"As keywords: `model.generate(…, {keywords(method)})`{_draft(method)}")
    lines.append(f"As a command: `{command(result, method)}{batch}`")
    cold = speed.cold_seconds(result, tuned["choice"], tuned["batch"])
    if cold is not None and method["engine"] != "eager":
        lines.append(f"Preparing it takes at most {cold:.1f} s in each process, and again for longer texts.")
    lines += [f"{line}." for line in at_the_edge(result, method)]
    if tuned["near"]:
        titles = "; ".join(speed.method_named(result, name)["title"] for name in tuned["near"])
        lines.append(f"Not surely slower: {titles}.")
    return lines


def _too_few(result: Result, tuned: Tuned) -> str:
    """Why there is no choice, and what helps."""
    batches = max(1, len(result["prompts"]) // tuned["batch"])
    if batches < ENOUGH:
        what = "prompts" if tuned["batch"] == 1 else f"batches of {tuned['batch']} prompts"
        return (
            f"There are too few prompts for a choice: it takes {ENOUGH} different {what}, and there are {batches}. "
            "Give more (--dataset, --limit)."
        )
    return (
        f"The time was too short for a choice: no candidate was measured on {ENOUGH} different examples. "
        "Raise --minutes."
    )


def _uncounted(tuned: Tuned) -> list[str]:
    """That a later race does not count, if so."""
    number = deciding_race(tuned["races"])
    if number is None or not any(race and race[-1]["kept"] for race in tuned["races"][number + 1 :]):
        return []
    return [
        f"The engines that need preparation were compared on fewer than {ENOUGH} different examples, too few to count. "
        "Raise --minutes or give more prompts."
    ]


def last_ratios(tuned: Tuned) -> dict[str, Interval]:
    """The ratios of the last stage of the race that decides, in the order of its ranking."""
    number = deciding_race(tuned["races"])
    stage = {"kept": ()} if number is None else tuned["races"][number][-1]
    return {name: Interval(*stage["ratios"][name]) for name in stage["kept"]}


def tried(tuned: Tuned) -> list[tuple[str, str, Interval, int]]:
    """(candidate, last stage as race.stage, its ratio there, examples); those that got furthest come first.

    Of the race that decides, before those of the others.
    """
    found: dict[str, tuple[str, str, Interval, int]] = {}
    decides = deciding_race(tuned["races"])
    races = sorted(enumerate(tuned["races"], start=1), key=lambda item: (item[0] - 1 != decides, -item[0]))
    for number_of_race, race in races:
        for number_of_stage, stage in reversed(list(enumerate(race, start=1))):
            for name, ends in sorted(stage["ratios"].items(), key=lambda item: -item[1][0]):
                place = f"{number_of_race}.{number_of_stage}"
                found.setdefault(name, (name, place, Interval(*ends), stage["examples"]))
    return list(found.values())


def for_other_engines(result: Result) -> list[str]:
    """Commands with the chosen draft of the first batch size that has one; none without a draft model."""
    models = result["models"]["target"]
    if result["encoder_decoder"] or "synthetic" in models:
        return []
    for tuned in result["tuned"]:
        draft = None if tuned["choice"] is None else speed.method_named(result, tuned["choice"])["draft"]
        if draft is not None:
            found = other_engines.commands(
                models["name"], draft, fixed_lookahead(result, tuned, draft), sampling=result["sampling"]
            )
            return [*(f"{name}:\n\n    {words}" for name, words in found), other_engines.REMARK]
    return []


def fixed_lookahead(result: Result, tuned: Tuned, draft: str) -> int:
    """The lookahead of the fastest candidate with this draft that drafts equally many tokens in every round."""
    methods = (speed.method_named(result, name) for name, *_ in tried(tuned))
    fixed = (
        int(method["lookahead"])
        for method in methods
        if method["draft"] == draft
        and method["kind"] == "speculative"
        and isinstance(method["lookahead"], int)
        and not {"entropy_threshold", "drafter"} & set(method["keywords"])
    )
    return next(fixed, 4)


def _remarks(result: Result) -> list[str]:
    return [*result["notes"], *([busy] if (busy := speed.busy(result)) else [])]


def _candidates(result: Result, tuned: Tuned) -> str:
    rows = []
    for name, stage, gain, examples in tried(tuned):
        loss = tuned["losses"].get(name)
        rows.append(
            [
                capital(speed.method_named(result, name)["title"]),
                stage,
                str(examples),
                ratio(gain),
                "–" if loss is None else difference(Interval(*loss)),
                number(speed.cold_seconds(result, name, tuned["batch"]), 1),
            ]
        )
    header = [
        "Candidate",
        "Stage",
        "Examples",
        "Speedup over plain generate()",
        "Quality (points)",
        "Preparation (s), at most",
    ]
    return table(header, rows)


def _draft(method: Mapping[str, Any]) -> str:
    return f", where draft is the loaded model `{method['draft']}`" if method["draft"] else ""
