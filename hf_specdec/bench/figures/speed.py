"""Rates and their ratios; times in seconds. Decode rates count only what comes after the first delivery."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hf_specdec.bench.figures.bootstrap import Cells, interval
from hf_specdec.bench.figures.frames import Part, quotient
from hf_specdec.bench.records import Interval, Method
from hf_specdec.config import STRATEGIES

if TYPE_CHECKING:
    import pandas as pd

BASELINES = {
    "plain": "plain generate()",
    "engine": "plain on the same engine",
    "assisted": "transformers' assisted generation",
}
_SHARED_BY = ("recorded", "static", "compiled")  # methods on these engines share what is prepared


def decode_rate(calls: pd.DataFrame) -> float | None:
    """Tokens per second after the first delivery, micro: all tokens / all seconds; None if there are none."""
    return quotient(calls["decode_tokens"].sum(), calls["decode_seconds"].sum())


def end_to_end_rate(calls: pd.DataFrame) -> float | None:
    """New tokens per second of whole calls, prompt pass included: all tokens / all seconds."""
    return quotient(calls["new_tokens"].sum(), calls["seconds"].sum())


def typical_calls(calls: pd.DataFrame) -> pd.DataFrame:
    """For each group of prompts, the repeat with the median total time (the lower of two).

    These are real calls, so their parts add up.
    """
    ordered = calls.sort_values(["indexes", "seconds"])
    place = ordered.groupby("prompts").cumcount()
    size = ordered.groupby("prompts")["seconds"].transform("size")
    return ordered[place == (size - 1) // 2]


def spread(calls: pd.DataFrame) -> float | None:
    """Median over groups of prompts of (slowest - fastest) / median total time of the repeats; None without repeats."""
    groups = calls.groupby(["method", "prompts"])["seconds"]
    ranges = ((groups.max() - groups.min()) / groups.median())[groups.size() > 1]
    return float(ranges.median()) if len(ranges) else None


def rate_interval(calls: pd.DataFrame) -> Interval | None:
    """The decode rate with its 95% interval."""
    return interval(_cells(_quantities(calls, "micro")), lambda tokens, seconds: tokens / seconds)


def speedup(part: Part, ours: str, base: str, by: str = "micro") -> Interval | None:
    """The ratio of two methods' rates over their common examples and repeats, with its 95% interval.

    Args:
        by: "micro", all tokens / all seconds after the first delivery (`decode_rate`); "end to end", prompt passes
            included (`end_to_end_rate`); "macro", as Spec-Bench's evaluation/speed.py: the mean over questions of
            (new tokens of all turns / wall time of all turns), a repeat counting as a further question.

    Returns:
        None if they have no example in common.
    """
    sides = [_quantities(part.of(name), by) for name in (ours, base)]
    both = sides[0].merge(sides[1], on=["prompts", "question", "repeat"])
    return interval(_cells(both), lambda a, b, c, d: (a / b) / (c / d))


def acceptance_gain(part: Part, ours: str, base: str) -> Interval | None:
    """A method's acceptance rate minus another's, in percentage points; None if either drafted nothing."""
    sides = [_quantities(part.of(name), "acceptance") for name in (ours, base)]
    if not all(side["below"].sum() for side in sides):
        return None
    both = sides[0].merge(sides[1], on=["prompts", "question", "repeat"])
    return interval(_cells(both), lambda a, b, c, d: 100 * (a / b - c / d))


def baseline(part: Part, method: Method, which: str) -> Method | None:
    """The baseline of a method; None if there is none, or if it is the method itself.

    Args:
        which: a key of `BASELINES`. For plain generate() and transformers' assisted generation, the fastest setting
            with the method's switches is used.
    """
    if which == "engine":
        fit = [one for one in part.methods if one.name == method.same_engine]
    else:
        switches = (method.cache, method.better_transformer)
        fit = [one for one in part.methods if one.kind == which and (one.cache, one.better_transformer) == switches]
    # Without decode rates there is no fastest setting, but end-to-end times can still be compared.
    found = fastest(part, fit) or next(iter(fit), None)
    return None if found is None or found.name == method.name else found


def over(part: Part, method: Method, which: str, by: str = "micro") -> Interval | None:
    """The speedup of a method over a baseline; None if there is none, and for the baseline itself."""
    base = baseline(part, method, which)
    return None if base is None else speedup(part, method.name, base.name, by)


def fastest(part: Part, methods: Iterable[Method]) -> Method | None:
    """The method with the highest decode rate over the common examples and repeats; the first of equals.

    Methods without a rate are left out; None if the others have no example in common.
    """
    listed = {method.name: method for method in methods}
    calls = part.of(*listed)
    calls = calls[calls["decode_tokens"] > 0]
    count = calls["method"].nunique()
    keys = ["prompts", "repeat"]
    shared = calls[calls.groupby(keys)["method"].transform("nunique") == count] if count else calls
    if not len(shared):
        return None
    sums = shared.groupby("method")[["decode_tokens", "decode_seconds"]].sum()
    rates = sums["decode_tokens"] / sums["decode_seconds"]
    return max((listed[name] for name in listed if name in rates.index), key=lambda method: rates[method.name])


def drafting(part: Part, engine: str | None = None) -> list[Method]:
    """This package's methods that draft, on one engine or on all."""
    return [one for one in part.methods if one.kind in STRATEGIES and one.ours and engine in (None, one.engine)]


def engines_of(part: Part) -> list[str]:
    """This package's engines, in the order in which they ran."""
    return list(dict.fromkeys(method.engine for method in part.methods if method.kind == "none"))


def cold_seconds(part: Part, method: Method, batch: int) -> float | None:
    """Extra seconds of a method's warm-up calls over as many warm calls; None without warm-up calls.

    This is the time for recording, compiling and capturing at the first prompt length, plus that of later calls which
    prepared something, such as those in which `"auto"` chose a new length. Methods on one engine share what is
    prepared, so the time of earlier methods at this batch size is included: an upper bound for the method alone.
    """
    order: dict[str, int] = {}
    for one in part.result.cold:
        if one.batch == batch:
            order.setdefault(one.method, one.number)
    own = _own_cold_seconds(part, method.name, batch)
    engine = method.engine if method.engine in _SHARED_BY else None
    if own is None or engine is None:
        return own
    alike = {one.name for one in part.result.methods if one.engine == engine}
    before = [name for name, number in order.items() if name in alike and number < order[method.name]]
    return own + sum(_own_cold_seconds(part, name, batch) or 0.0 for name in before)


def _own_cold_seconds(part: Part, method: str, batch: int) -> float | None:
    found = next((one for one in part.result.cold if (one.method, one.batch) == (method, batch)), None)
    if found is None:
        return None
    calls = part.where(batch=batch).of(method)
    extra = sum(found.seconds) - found.seconds[-1] * len(found.seconds)
    return max(0.0, float(extra)) + float(calls["preparing"].sum())


def tokens_until_it_pays(part: Part, ours: Method, base: Method, batch: int) -> float | None:
    """The number of new tokens after which a method has made up for loading its draft and its longer cold start.

    Returns:
        0 if its cold start takes no longer; None if the method is not faster, or if a cold start is unknown.
    """
    cold = [cold_seconds(part, method, batch) for method in (ours, base)]
    rates = [decode_rate(part.where(batch=batch).of(method.name)) for method in (ours, base)]
    if cold[0] is None or cold[1] is None or rates[0] is None or rates[1] is None or rates[0] <= rates[1]:
        return None
    loading = [part.result.loading_seconds.get(method.draft or "", 0.0) for method in (ours, base)]
    more = cold[0] + loading[0] - cold[1] - loading[1]
    return max(0.0, more / (1 / rates[1] - 1 / rates[0]))


def _quantities(calls: pd.DataFrame, by: str) -> Any:
    """Columns for prompts, question and repeat, and the two sums whose quotient is a rate."""
    keys = ["prompts", "question", "repeat"]
    if by == "micro":
        found = calls[calls["decode_tokens"] > 0][[*keys, "decode_tokens", "decode_seconds"]]
    else:
        found = calls[[*keys, *(("accepted", "drafted") if by == "acceptance" else ("new_tokens", "seconds"))]]
    found = found.set_axis([*keys, "above", "below"], axis=1)
    if by == "macro":
        found = found.groupby(["question", "repeat"], as_index=False)[["above", "below"]].sum()
        found = found.assign(above=found["above"] / found["below"], below=1.0, prompts=found["question"])
    return found


def _cells(quantities: Any) -> Cells:
    """The cells of a bootstrap; turns of one dialogue and lengths of one example are drawn together."""
    columns = [name for name in quantities.columns if name.startswith(("above", "below"))]
    sums = quantities.groupby(["question", "repeat"])[columns].sum()
    return [rows.to_numpy(dtype=float) for _, rows in sums.groupby("question")]
