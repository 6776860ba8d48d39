"""Figures of the task `engines`, as pure functions over the dicts that its JSON holds; times in seconds.

A run is `vars(engine_runs.BatchRun)`. Rates count the tokens of all rows after the first delivery, which is one token
a row in plain decoding and what the first round brought otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hf_specdec.bench.figures import speed

RunDict = Mapping[str, Any]
Result = Mapping[str, Any]

DRAFTING = ("fixed", "block", "stopped", "auto")  # the kinds of our methods that draft


@dataclass(frozen=True)
class Ratio:
    """A ratio of decode rates: the median of the repeats' ratios, and their extremes."""

    middle: float
    low: float
    high: float


def runs_of(result: Result, method: str, batch: int | None = None, group: int | None = None) -> list[RunDict]:
    """The runs of a method; of one batch size or one group of prompts only, where given."""
    wanted = {"method": method, "batch": batch, "group": group}
    return [
        run for run in result["runs"] if all(run[key] == value for key, value in wanted.items() if value is not None)
    ]


def decode_part(run: RunDict) -> tuple[float, int] | None:
    """(seconds, tokens of all rows) after the first delivery; None without a token there."""
    first = sum(run["rounds"]["new_tokens"][0]) if run["rounds"] else run["batch"]
    after = sum(len(row) for row in run["tokens"]) - first
    return (run["seconds"] - run["first_seconds"], after) if after > 0 else None


def rate(runs: Iterable[RunDict]) -> float | None:
    """Tokens per second after the first delivery, micro: all tokens of all rows / all seconds."""
    parts = [part for run in runs if (part := decode_part(run)) is not None]
    return sum(tokens for _, tokens in parts) / sum(seconds for seconds, _ in parts) if parts else None


def typical_rate(runs: Sequence[RunDict]) -> float | None:
    """The median of the repeats' rates."""
    repeats = sorted({run["repeat"] for run in runs})
    rates = [value for repeat in repeats if (value := rate(r for r in runs if r["repeat"] == repeat)) is not None]
    return median(rates) if rates else None


def ratio(runs: Sequence[RunDict], baseline: Sequence[RunDict]) -> Ratio | None:
    """Decode rates over those of a baseline, repeat by repeat; None where a repeat has none."""
    ratios = []
    for repeat in sorted({run["repeat"] for run in runs}):
        ours = rate(run for run in runs if run["repeat"] == repeat)
        theirs = rate(run for run in baseline if run["repeat"] == repeat)
        if ours is not None and theirs is not None:
            ratios.append(ours / theirs)
    return Ratio(median(ratios), min(ratios), max(ratios)) if ratios else None


def by_row(runs: Iterable[RunDict]) -> list[dict[str, Any]]:
    """The same rounds as `metrics` takes them: one pseudo-run a row, without the rounds after the row's end."""
    found = []
    for run in runs:
        if run["rounds"] is None:
            continue
        columns = run["rounds"]
        for row in range(run["batch"]):
            rounds = [
                {
                    "drafted": columns["drafted"][number][row],
                    "accepted": columns["accepted"][number][row],
                    "new_tokens": new[row],
                    "overlap": columns["overlap"] and columns["overlap"][number][row],
                }
                for number, new in enumerate(columns["new_tokens"])
                if new[row] > 0
            ]
            found.append({"rounds": rounds})
    return found


def waiting(runs: Iterable[RunDict]) -> float | None:
    """Share of row-rounds in which a row had ended and waited for the batch's slowest; None without rounds."""
    flags = [new == 0 for run in runs if run["rounds"] for row in run["rounds"]["new_tokens"] for new in row]
    return sum(flags) / len(flags) if flags else None


@dataclass(frozen=True)
class Costs:
    """Medians of bare passes on one engine at one batch size, in seconds.

    Args:
        draft: of one draft step, by the number of steps that ran in a row.
        target: of one target pass, by its width.
    """

    draft: Mapping[int, float]
    target: Mapping[int, float]

    def drafting(self, steps: int) -> float:
        """So many draft steps in a row."""
        return steps * _between(self.draft, steps)

    def verification(self, width: int) -> float:
        """A target pass of this width."""
        return _between(self.target, width)

    def ratios(self, lookahead: int) -> tuple[float, float]:
        """(c, v): a draft step, and a verification of lookahead + 1 tokens, each over one target step."""
        step = self.target[1]
        return _between(self.draft, lookahead) / step, self.verification(lookahead + 1) / step


def _between(known: Mapping[int, float], place: int) -> float:
    """The value at a place, linear between known ones, level beyond them."""
    below = max((key for key in known if key <= place), default=min(known))
    above = min((key for key in known if key >= place), default=max(known))
    if below == above:
        return known[below]
    share = (place - below) / (above - below)
    return (1 - share) * known[below] + share * known[above]


def costs(result: Result, engine: str, batch: int) -> Costs | None:
    """From all raw forwards of an engine at a batch size; None where the target's steps are not among them."""
    samples = [item["times"] for item in result["forwards"] if (item["engine"], item["batch"]) == (engine, batch)]
    draft, target = (_medians(samples, key) for key in ("draft", "target"))
    return Costs(draft, target) if draft and 1 in target else None


def _medians(samples: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Of each number of steps or tokens, over all samples that have it."""
    numbers = sorted({int(number) for sample in samples for number in sample[key]})
    return {n: median(s for sample in samples for s in sample[key].get(str(n), ())) for n in numbers}


def efficiency(runs: Iterable[RunDict], passes: Costs | None) -> float | None:
    """eta: what the bare passes need / measured decode time.

    Bare passes hold the whole batch. Rounds that are not prepared leave out rows that have ended, so that for them it
    is an upper bound where a batch has several rows.
    """
    needed = measured = 0.0
    for run in runs:
        part = decode_part(run)
        if part is None or passes is None:
            continue
        measured += part[0]
        if run["rounds"] is None:
            needed += part[1] / run["batch"] * passes.target[1]
        else:
            steps, widths = run["rounds"]["draft_steps"][1:], run["rounds"]["width"][1:]
            needed += sum(passes.drafting(n) for n in steps if n) + sum(passes.verification(w) for w in widths)
    return needed / measured if measured else None


def allowed(result: Result, method: Mapping[str, Any], batch: int) -> float | None:
    """The speedup over plain decoding on the same engine that measured α, c and v allow (Leviathan et al. 2023).

    As if no row ever waited for another. None without a fixed lookahead, α or bare passes.
    """
    passes = costs(result, method["engine"], batch)
    alpha = speed.alpha(by_row(runs_of(result, method["name"], batch)))
    if alpha is None or method["lookahead"] is None or passes is None:
        return None
    return speed.predicted_speedup(alpha, *passes.ratios(method["lookahead"]), method["lookahead"])


def share_of_allowed(result: Result, method: Mapping[str, Any], batch: int) -> float | None:
    """Measured over allowed speedup, both over plain decoding on the method's engine."""
    limit, measured = allowed(result, method, batch), over_plain_on_engine(result, method, batch)
    return None if limit is None or measured is None else measured.middle / limit


def fastest(result: Result, batch: int, **facts: Any) -> Mapping[str, Any] | None:
    """The method with the highest rate at a batch size, of those whose facts are these (a tuple: one of these)."""
    best: tuple[float, Mapping[str, Any]] | None = None
    for method in result["methods"]:
        fits = all(method[key] in (value if isinstance(value, tuple) else (value,)) for key, value in facts.items())
        speed = typical_rate(runs_of(result, method["name"], batch)) if fits else None
        if speed is not None and (best is None or speed > best[0]):
            best = speed, method
    return None if best is None else best[1]


def plain_on(result: Result, engine: str, batch: int) -> Mapping[str, Any] | None:
    """Plain decoding on an engine: generate() for the eager one, our loop without a draft for the others."""
    kind = "plain" if engine == "eager" else "none"
    return fastest(result, batch, kind=kind, engine=engine)


def over_plain_on_engine(result: Result, method: Mapping[str, Any], batch: int) -> Ratio | None:
    """A method over plain decoding on its engine; None where one of them did not run."""
    base = plain_on(result, method["engine"], batch)
    if base is None:
        return None
    return ratio(runs_of(result, method["name"], batch), runs_of(result, base["name"], batch))


def break_even(result: Result, engine: str) -> int | None:
    """The smallest batch size at which no draft of ours beats plain decoding on its engine; None: they all pay."""
    for batch in sorted({run["batch"] for run in result["runs"]}):
        ours = fastest(result, batch, kind=DRAFTING, engine=engine)
        gain = None if ours is None else over_plain_on_engine(result, ours, batch)
        if gain is not None and gain.middle <= 1:
            return int(batch)
    return None


def worst_prompt(result: Result, method: str, baseline: str = "plain") -> tuple[int, int, Ratio] | None:
    """(batch size, group, ratio) where a method does worst against a baseline; None without runs."""
    places = sorted({(run["batch"], run["group"]) for run in runs_of(result, method)})
    found = [
        (batch, group, value)
        for batch, group in places
        if (value := ratio(runs_of(result, method, batch, group), runs_of(result, baseline, batch, group))) is not None
    ]
    return min(found, key=lambda item: item[2].middle) if found else None
