"""Rates and their ratios, from the calls that a result holds; times in seconds.

"First delivery" is what first reaches the caller: one token a row in plain decoding, what the first round brought
otherwise. Decode rates count what came after it only; a call in which nothing did has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add
from statistics import median
from typing import Any

from hf_specdec.bench.figures.bootstrap import Cells, Interval, Ratio, interval
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.running.methods_by_task import ENGINES
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.config import STRATEGIES

BASELINES = {
    "plain": "plain generate()",
    "engine": "plain on the same engine",
    "assisted": "transformers' assisted generation",
}
_SWITCHES = ("cache", "better_transformer")  # in which a baseline has to agree, where methods differ in them
_IDLE = 0.5  # processes at work; a machine with more at the start was not quiet


def calls_of(
    result: Result,
    method: str | None = None,
    *,
    prompts: Iterable[int] | None = None,
    batch: int | None = None,
    repeat: int | None = None,
) -> list[Call]:
    """The calls of a method, of batches whose first prompt is among `prompts`, of a batch size, of a repeat."""
    wanted = None if prompts is None else set(prompts)
    return [
        call
        for call in result["calls"]
        if (method is None or call.method == method)
        and (wanted is None or call.prompt in wanted)
        and (batch is None or call.batch == batch)
        and (repeat is None or call.repeat == repeat)
    ]


def questions_of(result: Result) -> dict[int, int]:
    """The question that each prompt belongs to: turns of a dialogue have one, and so has an example at any length."""
    return {prompt["index"]: prompt.get("question", prompt["index"]) for prompt in result["prompts"]}


def distinct_calls(result: Result, method: str) -> list[Call]:
    """A method's calls, without those that decoded what another did: repeats, or the same example at another length."""
    questions = questions_of(result)
    found: dict[Any, Call] = {}
    for call in calls_of(result, method):
        answered = tuple(questions[index] for index in call.prompts), tuple(map(tuple, call.tokens))
        found.setdefault(answered, call)
    return list(found.values())


def batch_sizes(result: Result) -> list[int]:
    """The batch sizes that were measured, ascending."""
    return sorted({call.batch for call in result["calls"]})


def method_named(result: Result, name: str) -> MethodDict:
    """The method's entry in a result."""
    found: MethodDict = next(method for method in result["methods"] if method["name"] == name)
    return found


def drafts_in_our_loop(method: MethodDict) -> bool:
    """Whether a method is a strategy of ours; transformers' own have no plain decoding on the same engine."""
    return method["kind"] in STRATEGIES and method["same_engine"] is not None


def new_tokens(call: Call) -> int:
    """New tokens of all rows."""
    return sum(len(row) for row in call.tokens)


def decode_part(call: Call) -> tuple[float, int] | None:
    """(seconds, tokens of all rows) after the first delivery; None without a token there."""
    first = call.batch if call.rounds is None else sum(call.rounds.new_tokens[0])
    after = new_tokens(call) - first
    return (call.seconds - call.first_seconds, after) if after > 0 else None


def decode_rate(calls: Iterable[Call]) -> float | None:
    """Tokens per second after the first delivery, micro: all tokens / all seconds."""
    parts = [part for call in calls if (part := decode_part(call)) is not None]
    return sum(tokens for _, tokens in parts) / sum(seconds for seconds, _ in parts) if parts else None


def end_to_end_rate(calls: Iterable[Call]) -> float | None:
    """New tokens / total seconds, the prompt's pass included: all tokens / all seconds."""
    listed = list(calls)
    return sum(map(new_tokens, listed)) / sum(call.seconds for call in listed) if listed else None


def typical_calls(calls: Iterable[Call]) -> list[Call]:
    """For each group of prompts, the repeat with the median total time (the lower of two).

    These are calls that really happened, so their parts add up.
    """
    groups: dict[tuple[int, ...], list[Call]] = {}
    for call in calls:
        groups.setdefault(call.prompts, []).append(call)
    ordered = (sorted(group, key=lambda call: call.seconds) for _, group in sorted(groups.items()))
    return [group[(len(group) - 1) // 2] for group in ordered]


def spread(calls: Iterable[Call]) -> float | None:
    """Median over groups of prompts of (slowest - fastest) / median total time of its repeats; None without any."""
    groups: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    for call in calls:
        groups.setdefault((call.method, call.prompts), []).append(call.seconds)
    spreads = [(max(group) - min(group)) / median(group) for group in groups.values() if len(group) > 1]
    return median(spreads) if spreads else None


def rate_interval(result: Result, calls: Sequence[Call]) -> Interval | None:
    """The decode rate with its 95% interval."""
    parts = _decode_parts(result, calls)
    return interval(by_question(result, parts), lambda tokens, seconds: tokens / seconds)


def speedup(
    result: Result,
    ours: str,
    base: str,
    *,
    prompts: Iterable[int] | None = None,
    batch: int | None = None,
    by: str = "micro",
    deciding: bool = False,
) -> Ratio | None:
    """The ratio of two methods' rates over the examples and repeats that both have, with its 95% interval.

    Args:
        by: "micro", all tokens / all seconds after the first delivery (`decode_rate`); "end to end", prompt passes
            included (`end_to_end_rate`); "macro", as Spec-Bench's evaluation/speed.py: the mean over questions of
            (new tokens of all turns / wall time of all turns), a repeat counting as a further question.
        deciding: see `interval`.

    Returns:
        None where they have no example in common.
    """
    quantities, figure = _RATIOS[by]
    wanted = None if prompts is None else set(prompts)
    sides = [quantities(result, calls_of(result, name, prompts=wanted, batch=batch)) for name in (ours, base)]
    found = interval(by_question(result, _paired(*sides)), figure, deciding=deciding)
    return None if found is None else Ratio(found.value, found.low, found.high)


def baseline(result: Result, method: MethodDict, which: str, batch: int | None = None) -> MethodDict | None:
    """The baseline that a method is compared with; None if the result has none, or if it is the method itself.

    Args:
        which: a key of `BASELINES`; of transformers' assisted generation the fastest setting.
    """
    found: MethodDict | None
    if which == "engine":
        found = next((m for m in result["methods"] if m["name"] == method["same_engine"]), None)
    else:
        switches = {key: method[key] for key in _SWITCHES if key in method}
        found = fastest(result, batch=batch, kind=which, **switches)
    return None if found is None or found["name"] == method["name"] else found


def fastest(
    result: Result, *, batch: int | None = None, prompts: Iterable[int] | None = None, **facts: Any
) -> MethodDict | None:
    """The method with the highest decode rate among those with these facts (a tuple means any of its values)."""
    wanted = {key: value if isinstance(value, tuple) else (value,) for key, value in facts.items()}
    fit = [m for m in result["methods"] if all(m.get(key) in values for key, values in wanted.items())]
    return fastest_of(result, fit, batch=batch, prompts=prompts)


def fastest_of(
    result: Result, methods: Iterable[MethodDict], *, batch: int | None = None, prompts: Iterable[int] | None = None
) -> MethodDict | None:
    """The one with the highest decode rate among some methods, over the examples and repeats that all have.

    The first if several. Methods without any rate are left out; None where the others have no example in common.
    """
    wanted = None if prompts is None else set(prompts)
    rated = []
    for one in methods:
        calls = calls_of(result, one["name"], prompts=wanted, batch=batch)
        if with_rate := [call for call in calls if decode_part(call) is not None]:
            rated.append((one, with_rate))
    shared = set.intersection(*({(c.prompts, c.repeat) for c in calls} for _, calls in rated)) if rated else set()
    rates = [(decode_rate(c for c in calls if (c.prompts, c.repeat) in shared), one) for one, calls in rated]
    known = [(rate, one) for rate, one in rates if rate is not None]
    return max(known, key=lambda item: item[0])[1] if known else None


def cold_seconds(result: Result, method: str, batch: int) -> float | None:
    """Seconds that a method's warm-up calls took beyond as many warm calls; None without warm-up calls.

    The time of recording, compiling and capturing, at the first prompt length that was warmed up, with that of later
    calls, such as those in which `"auto"` chose a length for the first time. Methods on an engine of ours share what is
    prepared, so that of the ones before at this batch size is included: an upper bound of what the method takes alone.
    """
    engine = _preparing_engine(method_named(result, method))
    own = _own_cold_seconds(result, method, batch)
    if own is None or engine not in ENGINES:
        return own
    places = {one["name"]: place for place, one in enumerate(result["methods"])}
    # In files of earlier versions methods were warmed up in the order in which they are listed.
    order = {
        item["method"]: item.get("number", places[item["method"]])
        for item in reversed(result["cold"])
        if item["batch"] == batch and _preparing_engine(method_named(result, item["method"])) == engine
    }
    before = [name for name, number in order.items() if number < order[method]]
    return own + sum(_own_cold_seconds(result, name, batch) or 0.0 for name in before)


def _preparing_engine(method: MethodDict) -> str:
    """The engine that a method shares what is prepared with: compiled rounds bring the kernels along."""
    return "compiled" if method["engine"] == "kernels" else str(method["engine"])


def _own_cold_seconds(result: Result, method: str, batch: int) -> float | None:
    records = [item for item in result["cold"] if (item["method"], item["batch"]) == (method, batch)]
    if not records:
        return None
    seconds = records[0]["seconds"]
    warm = seconds[-1]
    later = sum(call.preparing for call in calls_of(result, method, batch=batch))
    return max(0.0, float(sum(seconds) - warm * len(seconds))) + later


def loading_seconds(result: Result, method: MethodDict) -> float:
    """How long loading the method's draft took; every method needs the target."""
    return float(result["loading_seconds"].get(method["draft"], 0.0))


def tokens_until_it_pays(result: Result, ours: str, base: str, batch: int = 1) -> float | None:
    """The number of new tokens after which a method has made up for its longer cold start, loading the draft included.

    Returns:
        0 if its cold start takes no longer; None if the method is not faster, or if a cold start is unknown.
    """
    cold = [cold_seconds(result, name, batch) for name in (ours, base)]
    rates = [decode_rate(calls_of(result, name, batch=batch)) for name in (ours, base)]
    if cold[0] is None or cold[1] is None or rates[0] is None or rates[1] is None or rates[0] <= rates[1]:
        return None
    loading = [loading_seconds(result, method_named(result, name)) for name in (ours, base)]
    more = cold[0] + loading[0] - cold[1] - loading[1]
    return max(0.0, more / (1 / rates[1] - 1 / rates[0]))


def busy(result: Result) -> str | None:
    """A warning if other processes kept the machine busy at the start."""
    busy_cores = result["environment"]["busy_cores"]
    if busy_cores is None or busy_cores <= _IDLE:
        return None
    return f"The machine was not quiet: other work kept {busy_cores:.2f} cores busy at the start."


def unsettled(result: Result) -> str | None:
    """A warning if warm-up calls ended at their limit, before their times had settled."""
    items = [item for item in result["cold"] if not item["settled"]]
    if not items:
        return None
    names = ", ".join(dict.fromkeys(item["method"] for item in items))
    return f"Warm-up ended before two calls in a row were within 5% of each other: {names}."


_Quantities = dict[Any, dict[int, tuple[float, float]]]  # example → repeat → (tokens, seconds), or (rate, 1)


def _decode_parts(result: Result, calls: Sequence[Call]) -> _Quantities:
    found: _Quantities = {}
    for call in calls:
        if (part := decode_part(call)) is not None:
            found.setdefault(call.prompts, {})[call.repeat] = float(part[1]), part[0]
    return found


def _totals(result: Result, calls: Sequence[Call]) -> _Quantities:
    found: _Quantities = {}
    for call in calls:
        found.setdefault(call.prompts, {})[call.repeat] = float(new_tokens(call)), call.seconds
    return found


def _question_rates(result: Result, calls: Sequence[Call]) -> _Quantities:
    found: _Quantities = {}
    for (question, repeat), (tokens, seconds) in _question_totals(result, calls).items():
        found.setdefault(question, {})[repeat] = tokens / seconds, 1.0
    return found


def _question_totals(result: Result, calls: Sequence[Call]) -> dict[tuple[Any, int], tuple[float, float]]:
    """(new tokens, seconds) of all turns of each question, or batch of questions, in each repeat."""
    questions = questions_of(result)
    found: dict[tuple[Any, int], tuple[float, float]] = {}
    for call in calls:
        key = tuple(questions[index] for index in call.prompts), call.repeat
        tokens, seconds = found.get(key, (0.0, 0.0))
        found[key] = tokens + new_tokens(call), seconds + call.seconds
    return found


def _paired(ours: _Quantities, base: _Quantities) -> dict[Any, dict[int, tuple[float, ...]]]:
    """(ours, base) of every example and repeat that both have."""
    return {
        key: {
            repeat: (*ours[key][repeat], *base[key][repeat]) for repeat in sorted(ours[key].keys() & base[key].keys())
        }
        for key in sorted(ours.keys() & base.keys())
    }


def by_question(result: Result, examples: Mapping[Any, Mapping[int, tuple[float, ...]]]) -> Cells:
    """The cells of a bootstrap: the turns of a dialogue and one example at several lengths are drawn together.

    Args:
        examples: quantities by prompts (or questions, which stay) and repeat.
    """
    questions = questions_of(result)
    cells: dict[Any, dict[int, tuple[float, ...]]] = {}
    for key, by_repeat in examples.items():
        question = cells.setdefault(tuple(questions.get(index, index) for index in key), {})
        for repeat, values in by_repeat.items():
            so_far = question.get(repeat, (0.0,) * len(values))
            question[repeat] = tuple(map(add, so_far, values))
    return [list(by_repeat.values()) for _, by_repeat in sorted(cells.items()) if by_repeat]


def _ratio(ours: Any, our_seconds: Any, base: Any, base_seconds: Any) -> Any:
    return (ours / our_seconds) / (base / base_seconds)


_RATIOS: Mapping[str, tuple[Callable[[Result, Sequence[Call]], _Quantities], Callable[..., Any]]] = {
    "micro": (_decode_parts, _ratio),
    "macro": (_question_rates, _ratio),
    "end to end": (_totals, _ratio),
}
