"""Tables of the tasks benchmark and decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.figures.bootstrap import Ratio
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.equal_outputs import differences, equal_outputs
from hf_specdec.bench.reports.heading import heading, joined, remarks
from hf_specdec.bench.reports.markdown import capital, number, percent, ratio, table
from hf_specdec.bench.reports.tables import methods

EXAMPLES = (
    "Prefill runs from the call to the first delivery (one token in plain decoding, up to lookahead + 1 with a draft). "
    "Time/Token and Tokens/Sec count what came after it; – where nothing did. Of several repeats an example's row is "
    "the one with the median total time. The last row has all tokens / all seconds, and the mean prefill."
)
_COLUMNS = [
    "Example#",
    "Prompt Length (tokens)",
    "New Tokens Generated",
    "Total Time (s)",
    "Prefill Phase (ms)",
    "Time/Token (ms)",
    "Tokens/Sec",
]
_DRAFTING_COLUMNS = ["Acceptance", "Tokens/Round"]


def render(result: Result) -> str:
    """The whole report of a `benchmark` or `decode` result."""
    parts = [heading(result)]
    if len(result["methods"]) > 1:
        parts += [
            f"## Speed\n\n{methods.SPEED}\n\n{methods.speed_table(result)}",
            "\n".join(f"- {line}" for line in conclusions(result)),
            f"## Rounds\n\n{methods.ROUNDS}\n\n{methods.round_table(result, by_length(result), 'Prompt length')}",
            f"## Bare passes\n\n{methods.PASSES}\n\n{methods.pass_table(result)}",
        ]
        if result["task"] != "decode":  # there the answers that were shown have prepared everything
            parts.append(f"## Cold cost\n\n{methods.COLD}\n\n{methods.cold_table(result)}")
    parts.append(f"## Examples\n\n{EXAMPLES}")
    parts += [
        f"### {capital(method['title'])}\n\n{example_table(result, method['name'])}" for method in result["methods"]
    ]
    return joined(parts, [*remarks(result), *_short_heads(result)])


def example_table(result: Result, method: str) -> str:
    """One row per example and one for all; the last columns only for methods that draft."""
    calls = speed.calls_of(result, method)
    typical = speed.typical_calls(calls)
    drafting = any(call.rounds is not None for call in typical)
    lengths = {prompt["index"]: prompt["tokens"] for prompt in result["prompts"]}
    rows = [_row(str(call.prompt + 1), str(lengths[call.prompt]), [call], drafting) for call in typical]
    rows.append(_row("all", "", typical, drafting))
    return table(_COLUMNS + (_DRAFTING_COLUMNS if drafting else []), rows)


def by_length(result: Result) -> dict[str, list[int] | None]:
    """The prompts of each length, and all prompts; for `decode`, whose lengths vary, only all prompts."""
    if result["task"] == "decode":
        return {"all": None}
    groups: dict[str, list[int] | None] = {}
    for prompt in result["prompts"]:
        same = groups.setdefault(str(prompt["tokens"]), [])
        assert same is not None
        same.append(prompt["index"])
    return groups | {"all": None} if len(groups) > 1 else groups


def chosen_method(result: Result) -> Mapping[str, Any]:
    """The method of the chosen strategy; plain decoding if there is none."""
    ours = [method for method in result["methods"] if speed.drafts_in_our_loop(method)]
    found: Mapping[str, Any] = [*ours, result["methods"][0]][0]
    return found


def gains_of_trimming(result: Result) -> dict[str, Ratio]:
    """How much faster the chosen strategy is with each trimmed draft than with the whole one, by what is compared."""
    whole = chosen_method(result)
    gains = {}
    for method in _trimmed(result):
        head = method["draft"].removeprefix(f"{whole['draft']}, ")
        gain = speed.speedup(result, method["name"], whole["name"])
        if gain is not None:
            gains[f"{whole['title']}, {head}, over the whole head"] = gain
    return gains


def conclusions(result: Result) -> list[str]:
    """Sentences: equality of outputs, speedups of the chosen strategy over each baseline, gains of trimmed drafts."""
    chosen, plain = chosen_method(result), methods.plain_name(result)
    lines = []
    if not result["sampling"]:
        lines = [f"Outputs of {m['title']}: {_equal(result, m['name'], plain)}." for m in result["methods"][1:]]
    for which, title in speed.BASELINES.items():
        gain = methods.over(result, chosen, which)
        ends = methods.over(result, chosen, which, by="end to end")
        if gain is not None:
            lines.append(f"{capital(chosen['title'])} over {title}: **{ratio(gain)}**; end to end {ratio(ends)}.")
        elif ends is not None:
            lines.append(
                f"{capital(chosen['title'])} over {title}: no example had tokens after its first delivery; "
                f"end to end {ratio(ends)}."
            )
    return lines + [f"{capital(words)}: **{ratio(gain)}**." for words, gain in gains_of_trimming(result).items()]


def _trimmed(result: Result) -> list[MethodDict]:
    """The methods whose draft has a trimmed head."""
    whole = chosen_method(result)["draft"]
    return [m for m in result["methods"] if speed.drafts_in_our_loop(m) and m["draft"] != whole]


def _short_heads(result: Result) -> list[str]:
    """Why a head has fewer tokens than were asked for."""
    asked = result["arguments"].get("draft_vocabulary")
    return [
        f"{method['draft']}: --draft_vocabulary {asked} asks for more, but the corpus holds no other tokens."
        for method in _trimmed(result)
        if asked is not None and f"head of {asked:,} tokens" not in method["draft"]
    ]


def _row(name: str, length: str, calls: Sequence[speed.Call], drafting: bool) -> list[str]:
    rate = speed.decode_rate(calls)
    cells = [
        name,
        length,
        str(sum(len(row) for call in calls for row in call.tokens)),
        number(sum(call.seconds for call in calls), 3),
        number(1000 * mean(call.first_seconds for call in calls), 2),
        number(None if rate is None else 1000 / rate, 2),
        number(rate, 1),
    ]
    if drafting:
        cells += [percent(rounds.acceptance_rate(calls)), number(rounds.tokens_per_round(calls), 2)]
    return cells


def _equal(result: Result, method: str, plain: str) -> str:
    found = differences(result, method, plain)
    if not found:
        return "equal to plain generate() on every example"
    where = ", ".join(f"example {prompt + 1} at token {position + 1}" for (_, prompt), position in found)
    return f"{equal_outputs(result, method, plain)} equal to plain generate(); first differences: {where}"
