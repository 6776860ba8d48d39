"""The columns for tables with a row per method; a table is a selection of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hf_specdec.bench.figures import passes, quality, speed
from hf_specdec.bench.figures.frames import (
    Part,
    acceptance_rate,
    alpha,
    examples,
    time_per_round,
    tokens_per_round,
    waiting,
)
from hf_specdec.bench.models.names import short_name
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports.markdown import approximate, capital, number, percent, points, ratio, size, table

# Computes a method's cell from the calls of a part.
Cell = Callable[[Part, Method], str]
Columns = Mapping[str, Cell]

SPEED = (
    "n: different examples. Tokens/Sec: tokens / seconds after the first delivery (the first token; with a draft, the "
    "first round), summed over all examples and repeats (micro). Speedups: ratios of these rates on the same examples, "
    "over the baseline that the column names. In brackets: 95% interval, by a paired bootstrap over examples and "
    "repeats, from six examples on; a method is faster where it lies above 1. The same engine: our loop without a "
    "draft, same compile mode and cache. γ: tokens drafted in a round. End to end includes the prompt."
)
MACRO_LEGEND = (
    "Macro is computed as in Spec-Bench's script: the mean over questions of new tokens / wall time, all turns and "
    "their prompts included."
)
ROUNDS_LEGEND = (
    "Acceptance: accepted / drafted tokens. Tokens/Round includes the target's own token. α: mean overlap of both "
    "distributions (Leviathan et al. 2023). η: time that the bare passes of the same engine need / measured time. "
    "Predicted: the speedup over plain decoding on the same engine that α and the bare passes give, with acceptance "
    "taken as independent from token to token; an estimate. Overhead: a round's time outside both models."
)
COLD_LEGEND = (
    "Cold: extra time of the warm-up calls over as many warm ones, for recording, capturing and compiling passes. "
    "Methods on an engine share this work, so each row includes the rows above it: an upper bound for the method "
    "alone. Pays after: new tokens until a method has made up for loading its draft and for its longer cold start "
    "than plain generate(); – where it is no faster. Peak memory: of the process during a call, or on the GPU."
)


def method_table(
    parts: Mapping[str, Part],
    columns: Columns,
    *,
    group: str | None = None,
    methods: Callable[[Part], Sequence[Method]] = lambda part: part.methods,
) -> str:
    """A table with a row for each part and method; empty if there are none.

    Args:
        parts: by name.
        group: the title of the column with the parts' names.
        methods: selects a part's methods that get a row.
    """
    rows = []
    for name, part in parts.items():
        for method in methods(part):
            row = {} if group is None else {group: name}
            rows.append(row | {title: cell(part, method) for title, cell in columns.items()})
    return table(rows) if rows else ""


def title(part: Part, method: Method) -> str:
    """The method's title with a capital letter."""
    return capital(method.title)


def over(result: Result, which: str, by: str = "micro") -> Columns:
    """The column of the speedup over a baseline; its title says if the weights of plain generate() are quantized."""
    words = "Speedup over" if by == "micro" else f"{capital(by)} speedup over"
    return {f"{words} {baseline_title(result, which)}": lambda part, method: ratio(speed.over(part, method, which, by))}


def baseline_title(result: Result, which: str) -> str:
    """The name of a baseline; for plain generate() with its weights if they are quantized."""
    weights = result.models["target"].dtype.partition(" weights")
    return speed.BASELINES[which] + (f" in {weights[0]}" if weights[1] and which == "plain" else "")


def quantized_note(result: Result) -> list[str]:
    """A note on speedups over plain generate() with quantized weights."""
    weights = result.models["target"].dtype.partition(" weights")
    if not weights[1]:
        return []
    by_quanto = weights[0].startswith("int")
    slowly = ", as quantized by optimum-quanto, which multiplies them more slowly than float32" if by_quanto else ""
    beside = ", which has rows of its own" if any(one.name == "plain float32" for one in result.methods) else ""
    return [
        f"Plain generate() ran with {weights[0]} weights{slowly}: speedups over it "
        f"say nothing about float32{beside}. The gain from drafting is that over plain decoding on the same engine."
    ]


def equal_outputs(part: Part, method: Method) -> str:
    """The number of outputs of the first repeat that equal plain generate()'s at the same batch size; – in sampling."""
    plain = next((one for one in part.result.methods if one.kind == "plain"), None)
    if part.result.settings.sampling or plain is None:
        return "–"
    first = part.where(repeat=0)
    theirs = dict(zip(first.of(plain.name)["prompts"], first.of(plain.name)["outputs"], strict=True))
    mine = first.of(method.name)
    rows = [
        (one, other)
        for prompts, outputs in zip(mine["prompts"], mine["outputs"], strict=True)
        for one, other in zip(outputs, theirs.get(prompts, outputs), strict=True)
    ]
    return f"{sum(one == other for one, other in rows)} of {len(rows)}"


def _round(part: Part, method: Method, what: str, factor: float = 1000.0) -> str:
    found = time_per_round(part.of(method.name))
    return number(None if found is None else factor * found[what], 2)


def _ratios(part: Part, method: Method, which: int) -> str:
    """c or v, for methods that draft a fixed number of tokens on this package's engines."""
    if not isinstance(method.lookahead, int) or method.same_engine is None or method.draft is None:
        return "–"
    batch = part.batch_sizes[0]
    found = passes.costs_of(part, method, batch)
    return number(None if found is None else found.ratios(method.lookahead)[which], 3)


def _pays(part: Part, method: Method) -> str:
    base, batch = speed.baseline(part, method, "plain"), part.batch_sizes[0]
    return approximate(None if base is None else speed.tokens_until_it_pays(part, method, base, batch))


def _peak(part: Part, method: Method) -> str:
    peak = part.of(method.name)["peak_bytes"].max()
    return number(peak / 1e9 if peak == peak and peak is not None else None, 2)


def _measured(part: Part, method: Method) -> str:
    # The engine of transformers' own loops is generate().
    found = speed.over(part, method, "plain" if method.same_engine is None else "engine")
    return number(None if found is None else found.value, 2)


METHOD: Columns = {"Method": title}
N: Columns = {"n": lambda part, method: str(examples(part.of(method.name)))}
RATE: Columns = {"Tokens/Sec": lambda part, method: number(speed.decode_rate(part.of(method.name)), 1)}
END_TO_END: Columns = {
    "Tokens/Sec, end to end": lambda part, method: number(speed.end_to_end_rate(part.of(method.name)), 1)
}
EQUAL: Columns = {"Outputs as plain": equal_outputs}
ACCEPTANCE: Columns = {"Acceptance": lambda part, method: percent(acceptance_rate(part.of(method.name)))}
TOKENS: Columns = {"Tokens/Round": lambda part, method: number(tokens_per_round(part.of(method.name)), 2)}
ALPHA: Columns = {"α": lambda part, method: number(alpha(part.of(method.name)), 3)}
COSTS: Columns = {
    "c": lambda part, method: _ratios(part, method, 0),
    "v": lambda part, method: _ratios(part, method, 1),
}
ROUNDS: Columns = {
    **METHOD, **N, **ACCEPTANCE, **TOKENS, **ALPHA, **COSTS,
    "η": lambda part, method: number(passes.efficiency(part, method), 2),
    "Predicted speedup over plain on the same engine": lambda part, method: number(
        passes.predicted(part, method, part.batch_sizes[0]), 2
    ),
    "Measured": _measured,
    "Draft steps/Round": lambda part, method: _round(part, method, "draft_steps", 1.0),
    "Draft (ms)": lambda part, method: _round(part, method, "draft"),
    "Verification (ms)": lambda part, method: _round(part, method, "verify"),
    "Overhead (ms)": lambda part, method: _round(part, method, "overhead"),
}  # fmt: skip
WAITING: Columns = {"Waiting": lambda part, method: percent(waiting(part.of(method.name)))}
COLD: Columns = {
    **METHOD,
    "Cold (s)": lambda part, method: number(speed.cold_seconds(part, method, part.batch_sizes[0]), 2),
    "Pays after (tokens)": _pays,
    "Peak memory (GB)": _peak,
}
DRAFT: Columns = {
    "Draft": lambda part, method: short_name(method.draft or "none"),
    "Parameters": lambda part, method: size(method.draft_parameters),
    "n_lookahead": lambda part, method: "–" if method.lookahead is None else str(method.lookahead),
}


def speed_columns(result: Result, *, macro: bool = False) -> Columns:
    """Columns for rates and speedups over each baseline."""
    found = {**METHOD, **N, **RATE}
    for which in speed.BASELINES:
        found |= over(result, which)
    return {**found, **(over(result, "plain", "macro") if macro else {}), **END_TO_END, **EQUAL}


def drafted(part: Part) -> list[Method]:
    """The methods that drafted any tokens."""
    return [method for method in part.methods if part.of(method.name)["drafted"].sum()]


def quality_change(name: str, base: str = "plain") -> Callable[[Part, Method], str]:
    """A column with the difference in a measure from plain decoding, in points."""
    return lambda part, method: points(quality.difference(part, method.name, base, name))
