"""Tables of the task sweep."""

from __future__ import annotations

from hf_specdec.bench.figures import passes, rounds, speed, tradeoff
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.figures.tradeoff import labels
from hf_specdec.bench.models.known_pairs import short_name
from hf_specdec.bench.reports.best_settings import methods_of, recommendations, won_subtasks
from hf_specdec.bench.reports.equal_outputs import equal_outputs
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import number, ratio, table
from hf_specdec.bench.reports.tables import lossy, methods
from hf_specdec.bench.reports.tables.subtasks import NO_LOSS
from hf_specdec.bench.running.methods import STRATEGY_TITLES

# Keywords that have a column of their own.
_COLUMNS = ("generation_strategy", "num_assistant_tokens", "fallback_threshold", "rollback_threshold")
_QUALITY = ("bleu", "rougeL", "exact_match")

LEGEND = (
    "c: one draft step / one target step, bare passes on the same engine. The predicted speedup takes acceptance "
    "as independent from token to token, so it is an estimate. Quality is measured against the references, 0 to 100. "
    "Won: on how many subtasks a row of BiLD is faster than the fastest speculative row (the interval lies above 1) "
    "with quality kept: no answer is worse by any measure, or a loss of more than one point is excluded. The fastest "
    f"row is chosen on the calls that it is measured on, which flatters it a little. {NO_LOSS}"
)


def render(result: Result) -> str:
    """The whole report."""
    lines = [*recommendations(result), *remarks(result)]
    parts = [heading(result), f"{methods.SPEED} {LEGEND}", _tables(result)]
    parts.append(f"## Cold cost\n\n{methods.COLD}\n\n{methods.cold_table(result)}")
    parts.append("## Best settings\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def terminal(result: Result) -> str:
    """The tables and the best settings."""
    return "\n\n".join([_tables(result), *recommendations(result), *remarks(result)]) + "\n"


def draft_table(result: Result) -> str:
    """One row per draft and lookahead: measured and predicted figures."""
    header = ["Draft", "Parameters", "n_lookahead", "Mean acceptance rate", "Inference speed ratio (c)"]
    header += [*(f"Speedup over {title}" for title in speed.BASELINES.values())]
    header += ["Predicted over plain on the same engine", "Tokens/Round", "α", "Tokens/Sec", "Outputs as plain"]
    rows = []
    others = tradeoff.lossy_methods(result)
    for method in [m for m in result["methods"] if m not in others]:
        calls = speed.calls_of(result, method["name"])
        size = method["draft_parameters"]
        rows.append(
            [
                _name(method),
                "–" if size is None else parameters(size),
                "–" if method["lookahead"] is None else str(method["lookahead"]),
                number(rounds.acceptance_rate(calls), 3),
                number(speed_ratio(result, method), 3),
                *(ratio(methods.over(result, method, which)) for which in speed.BASELINES),
                number(passes.predicted(result, method), 2),
                *_round_figures(result, method),
            ]
        )
    return table(header, rows)


def threshold_table(result: Result) -> str:
    """One row per draft, lookahead and pair of BiLD's thresholds: speed and quality, beside the lossless rows."""
    header = ["Draft", "n_lookahead", "Fallback", "Rollback", "Mean acceptance rate"]
    header += [f"Speedup over {title}" for title in speed.BASELINES.values()]
    header += ["Tokens/Round", "α", "Tokens/Sec", "Outputs as plain", "BLEU", "ROUGE-L", "Exact match", "Won"]
    rows = []
    others = [m for m in tradeoff.lossy_methods(result) if m["kind"] != "bild"]
    for method in [m for m in result["methods"] if m not in others]:
        calls = speed.calls_of(result, method["name"])
        rows.append(
            [
                _name(method),
                "–" if method["lookahead"] is None else str(method["lookahead"]),
                *(f"{value:g}" if value is not None else "–" for value in thresholds(method)),
                number(rounds.acceptance_rate(calls), 3),
                *(ratio(methods.over(result, method, which)) for which in speed.BASELINES),
                *_round_figures(result, method),
                *_quality(result, method["name"]),
                _won_of(result, method),
            ]
        )
    return table(header, rows)


def thresholds(method: MethodDict) -> tuple[float | None, float | None]:
    """(fallback, rollback); None for methods without thresholds."""
    if method["kind"] != "bild":
        return None, None
    return method["keywords"]["fallback_threshold"], method["keywords"]["rollback_threshold"]


def speed_ratio(result: Result, method: MethodDict) -> float | None:
    """c, over the passes that belong to the method's calls; None where bare passes were not timed."""
    if not isinstance(method["lookahead"], int) or method["same_engine"] is None or method["draft"] is None:
        return None
    found = passes.costs_of(result, method, speed.calls_of(result, method["name"], batch=1))
    return None if found is None else found.ratios(method["lookahead"])[0]


def parameters(count: int) -> str:
    """A count of parameters with its unit."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"


def _tables(result: Result) -> str:
    parts = [f"## Drafts and lookaheads\n\n{draft_table(result)}"]
    if methods_of(result, "bild"):
        parts.append(f"## BiLD's thresholds\n\n{threshold_table(result)}")
    return "\n\n".join([*parts, *lossy.parts(result)])


def _name(method: MethodDict) -> str:
    """The draft's name, and settings that have no column of their own."""
    draft = short_name(method["draft"] or "none")
    words = method["title"].removesuffix(f" with {draft}")
    if speed.drafts_in_our_loop(method):
        further = [f"{k}={v}" for k, v in method["keywords"].items() if k not in _COLUMNS]
        strategy = method["kind"] if method["kind"] == "speculative" else STRATEGY_TITLES[method["kind"]]
        words = ", ".join([strategy, *further])
    return f"{draft} ({words})"


def _round_figures(result: Result, method: MethodDict) -> list[str]:
    """Tokens a round, α, tokens/s, and outputs equal to plain decoding's."""
    calls = speed.calls_of(result, method["name"])
    figures = [number(rounds.tokens_per_round(calls), 2), number(rounds.alpha(calls), 3)]
    equal = equal_outputs(result, method["name"], methods.plain_name(result))
    return [*figures, number(speed.decode_rate(calls), 1), equal]


def _quality(result: Result, name: str) -> list[str]:
    found = [item for item in result["quality"] if item["method"] == name and item["subtask"] is None]
    return [number(found[0][key], 1) for key in _QUALITY] if found else ["–"] * len(_QUALITY)


def _won_of(result: Result, method: MethodDict) -> str:
    count = won_subtasks(result, method) if method["kind"] == "bild" else None
    return "–" if count is None else f"{count} of {len(labels(result))}"
