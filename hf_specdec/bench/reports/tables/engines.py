"""Tables of the task engines."""

from __future__ import annotations

from hf_specdec.bench.figures import bandwidth, passes, rounds, speed
from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.figures.speed import batch_sizes
from hf_specdec.bench.reports.heading import heading, joined, remarks
from hf_specdec.bench.reports.markdown import capital, number, percent, ratio, table
from hf_specdec.bench.reports.tables import llama_cpp, methods

DRAFTING = ("speculative", "bild")

ALLOWED = (
    "Allowed: the speedup over plain decoding on the same engine that the same rounds would have if they took only "
    "their bare passes and no row waited for another. Share: measured / allowed, which is η times (1 - waiting). "
    "Waiting: share of row-rounds in which a row had ended while others of its batch went on. c and v: from the mean "
    "over calls of the passes at the prompt length nearest to each call's."
)

# On a draft against plain decoding, in the order in which they are said.
_VERDICTS = (
    "is faster than plain decoding",
    "is slower than plain decoding",
    "is not shown to be faster",
    "was called once, too little to tell,",
)
CHOSEN = "It was chosen on the calls that it is measured on, which flatters it a little."


def render(result: Result) -> str:
    """The whole report."""
    parts = [heading(result), f"{methods.SPEED} No text ends early here, so all methods decode equally many tokens."]
    for batch in batch_sizes(result):
        parts.append(f"## Batch size {batch}\n\n{methods.speed_table(result, batch=batch)}")
    if llama_cpp.engines_of(result):
        parts.append(f"## Over llama.cpp\n\n{llama_cpp.legend(result)}\n\n{llama_cpp.table_over_llama_cpp(result)}")
    parts.append(f"## Rounds\n\n{methods.ROUNDS}")
    for batch in batch_sizes(result):
        parts.append(methods.round_table(result, {str(batch): None}, "Batch size", batch))
    parts.append(f"## What bare passes allow\n\n{ALLOWED}\n\n{allowed_table(result)}")
    parts.append(f"## Cold cost\n\n{methods.COLD}")
    parts += [f"Batch size {batch}:\n\n{methods.cold_table(result, batch)}" for batch in batch_sizes(result)]
    return joined(parts, conclusions(result))


def engines_of(result: Result) -> list[str]:
    """Our engines, in the order in which they ran."""
    return list(dict.fromkeys(m["engine"] for m in result["methods"] if m["kind"] == "none"))


def allowed_table(result: Result) -> str:
    """One row per batch size and method of this package with a constant lookahead."""
    header = ["Batch size", "Method", "α", "c", "v", "Waiting", "Allowed", "Measured", "Share"]
    rows = []
    for batch in batch_sizes(result):
        for method in methods.shown_methods(result, batch=batch):
            if method.get("role") != "fixed":
                continue
            calls = speed.calls_of(result, method["name"], batch=batch)
            costs = passes.costs_of(result, method, calls, batch)
            if costs is None:
                continue
            rows.append(
                [
                    str(batch),
                    capital(method["title"]),
                    number(rounds.alpha(calls), 3),
                    *(number(value, 3) for value in costs.ratios(method["lookahead"])),
                    percent(rounds.waiting(calls)),
                    number(passes.allowed(result, method, batch), 2),
                    ratio(methods.over(result, method, "engine", batch=batch)),
                    number(passes.share_of_allowed(result, method, batch), 2),
                ]
            )
    return table(header, rows)


def conclusions(result: Result) -> list[str]:
    """Where drafting pays, the share of the memory's bandwidth, and remarks on the run."""
    lines = [line for engine in engines_of(result) if (line := _where_it_pays(result, engine))]
    return [*lines, *_not_compiled(result), *_without_rate(result), *_bandwidth_lines(result), *remarks(result)]


def _where_it_pays(result: Result, engine: str) -> str | None:
    """At which batch sizes the fastest draft is faster, or slower, than plain decoding on the same engine."""
    sizes: dict[str, list[str]] = {verdict: [] for verdict in _VERDICTS}
    for batch in batch_sizes(result):
        best = speed.fastest(result, batch=batch, kind=DRAFTING, engine=engine)
        gain = None if best is None else methods.over(result, best, "engine", batch=batch)
        if gain is not None:
            sizes[_verdict(gain)].append(f"{batch} ({ratio(gain)})")
    parts = [f"{verdict} at batch size {', '.join(some)}" for verdict, some in sizes.items() if some]
    return f"On the {engine} engine the fastest draft setting {' and '.join(parts)}. {CHOSEN}" if parts else None


def _verdict(gain: Ratio) -> str:
    faster, slower, unsure, single = _VERDICTS
    if gain.low is None:
        return single
    return faster if gain.faster else slower if gain.slower else unsure


def _not_compiled(result: Result) -> list[str]:
    """Batch sizes at which nothing could be compiled, so that the methods named compiled ran without it."""
    sizes = sorted({item["batch"] for item in result["passes"] if item["engine"] == "compiled"})
    left = [str(batch) for batch in sizes if not passes.costs(result, "compiled", batch)]
    if not left:
        return []
    why = "these models, this machine or its compiler don't allow it; a warning on stderr said why"
    return [
        f"Nothing was compiled at batch size {', '.join(left)}: {why}. So the methods named compiled ran without it."
    ]


def _without_rate(result: Result) -> list[str]:
    """The methods that have no Tokens/Sec, and why."""
    lines = []
    for batch in batch_sizes(result):
        shown = methods.shown_methods(result, batch=batch)
        calls = {m["title"]: speed.calls_of(result, m["name"], batch=batch) for m in shown}
        if lacking := [title for title, some in calls.items() if speed.decode_rate(some) is None]:
            why = "no tokens after the first delivery, so no Tokens/Sec: raise --max_new_tokens."
            lines.append(f"{capital(', '.join(lacking))} at batch size {batch}: {why}")
    return lines


def _bandwidth_lines(result: Result) -> list[str]:
    """The share of the memory's bandwidth that plain decoding reaches; none if the CPU's caches may hold the model."""
    memory = result["memory"]
    on_cpu = result["models"]["target"]["device"].startswith("cpu")
    weights = memory["weight_bytes"]
    if weights is None or (on_cpu and weights < bandwidth.BUFFER["cpu"]) or 1 not in batch_sizes(result):
        return []
    read = weights + (memory["cache_bytes"] or 0)
    lines = [
        f"A step at batch size 1 reads {read / 1e9:.2f} GB (weights, and the cache of {memory['context']} tokens); the "
        f"device reads {_rates(result)}."
    ]
    for method in (m for m in result["methods"] if m["kind"] in ("plain", "none")):
        share = bandwidth.share(result, method["name"])
        beyond = share is not None and share > 1
        why = ": memory was read faster during these calls than when its speed was measured" if beyond else ""
        lines.append(f"{capital(method['title'])} reaches {percent(share)} of the bandwidth limit{why}.")
    return lines


def _rates(result: Result) -> str:
    measured = [reading["bytes_per_second"] / 1e9 for reading in result.get("readings", ())]
    if not measured:  # a result of an earlier version
        return f"{result['memory']['read_bytes_per_second'] / 1e9:.1f} GB/s at best"
    return f"{min(measured):.1f} to {max(measured):.1f} GB/s, measured after each call without a draft"
