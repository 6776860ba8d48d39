"""Tables of the task align."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_specdec.bench.figures import rounds, speed
from hf_specdec.bench.figures.alignment import AFTER, BEFORE, acceptance_gain
from hf_specdec.bench.reports.heading import heading, remarks
from hf_specdec.bench.reports.markdown import difference, number, percent, table
from hf_specdec.bench.reports.tables import methods

Result = Mapping[str, Any]

_ACCEPTANCE = (
    "Accepted / drafted tokens on held-out prompts, before and after. Gain: the difference in points with its 95% "
    "interval, by a paired bootstrap over questions."
)
_POSITIONS = "Share accepted at each position of the draft, among the rounds that reached it."


def render(result: Result) -> str:
    """The whole report."""
    parts = [
        heading(result),
        verdict(result),
        f"## Acceptance\n\n{_ACCEPTANCE}\n\n{acceptance_table(result)}",
        f"## Acceptance by position\n\n{_POSITIONS}\n\n{position_table(result)}",
        f"## Speed\n\n{methods.SPEED}\n\n{methods.speed_table(result)}",
        f"## Rounds\n\n{methods.ROUNDS}\n\n{methods.round_table(result, {'held-out': None}, 'Prompts')}",
        f"## Training\n\n{training_table(result)}",
    ]
    if lines := remarks(result):
        parts.append("## Remarks\n\n" + "\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def verdict(result: Result) -> str:
    """A sentence: what became of acceptance, and whether the draft was saved."""
    before, after = (percent(rounds.acceptance_rate(speed.calls_of(result, name))) for name in (BEFORE, AFTER))
    change = f"from {before} to {after} on held-out prompts: {difference(acceptance_gain(result))} points"
    saved = result["alignment"]["saved"]
    if saved is None:
        return (
            f"**The draft did not get better**: acceptance went {change}. It was not saved. "
            "Try more prompts, more steps or another learning rate."
        )
    return f"Acceptance went {change}. The aligned draft is in `{saved}`."


def acceptance_table(result: Result) -> str:
    """One row a subtask, and one for all."""
    subtasks = list(dict.fromkeys(prompt["label"] for prompt in result["prompts"]))
    groups: dict[str, Sequence[int] | None] = {
        name: [prompt["index"] for prompt in result["prompts"] if prompt["label"] == name] for name in subtasks
    }
    rows = []
    for name, prompts in ((groups if len(groups) > 1 else {}) | {"all": None}).items():
        calls = [speed.calls_of(result, method, prompts=prompts) for method in (BEFORE, AFTER)]
        shares = [percent(rounds.acceptance_rate(some)) for some in calls]
        lengths = [number(rounds.tokens_per_round(some), 2) for some in calls]
        rows.append([name, *shares, difference(acceptance_gain(result, prompts)), *lengths])
    header = ["Subtask", "Before", "After", "Gain (points)", "Tokens/Round before", "Tokens/Round after"]
    return table(header, rows)


def position_table(result: Result) -> str:
    """One row a position."""
    before, after = (rounds.acceptance_by_position(speed.distinct_calls(result, name)) for name in (BEFORE, AFTER))
    rows = []
    for place in range(max(len(before), len(after))):
        cells = [percent(side[place].share) if place < len(side) else "–" for side in (before, after)]
        rows.append([str(place + 1), *cells])
    return table(["Position", "Before", "After"], rows)


def training_table(result: Result) -> str:
    """One row: data, loss, cost, and the losses at both ends."""
    arguments, facts = result["arguments"], result["alignment"]
    ends = [number(facts["held_out_curve"][place][1], 3) for place in (0, -1)]
    loss = arguments["loss"].replace("_", " ")
    if arguments["top_k_targets"]:
        loss += f", {arguments['top_k_targets']} tokens stored"
    if arguments["on_policy"]:
        loss += f", {arguments['on_policy']:.0%} on-policy"
    seconds = number(facts["seconds"], 1)
    if facts["resumed_at"]:
        seconds += f" (from step {facts['resumed_at']} on)"
    header = ["Loss", "Prompts", "Answer tokens", "Steps", "Texts/Step", "Learning rate", "Trained parameters"]
    header += ["Training (s)", "Held-out loss before", "After"]
    cells = [loss, f"{facts['prompts']:,}", f"{facts['tokens']:,}", str(facts["steps"]), str(facts["rows"])]
    cells += [f"{facts['learning_rate']:.2g}", f"{facts['parameters']:,}", seconds, *ends]
    return table(header, [cells])
