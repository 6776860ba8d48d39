"""What the tasks that train drafts report: whether to use the draft, how to call it, and how it was trained."""

from __future__ import annotations

from collections.abc import Sequence

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, acceptance_rate, tokens_per_round
from hf_specdec.bench.records import Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.best_settings import keywords
from hf_specdec.bench.reports.markdown import number, percent, points, ratio, table

BEFORE, AFTER, SUFFIX, AUTO = "before", "after", "suffix", "auto"  # the names of the methods
LEAST_GAIN = 1.05  # over plain decoding on the same engine, below which a draft is not recommended

ACCEPTANCE = (
    "n: different examples. Accepted / drafted tokens on held-out prompts, before and after. Gain: the difference in "
    "points with its 95% interval, by a paired bootstrap over questions, from six on."
)
ACCEPTED: columns.Columns = {
    **columns.N,
    "Before": lambda part, _: percent(acceptance_rate(part.of(BEFORE))),
    "After": lambda part, _: percent(acceptance_rate(part.of(AFTER))),
    "Gain (points)": lambda part, _: points(speed.acceptance_gain(part, AFTER, BEFORE)),
    "Tokens/Round before": lambda part, _: number(tokens_per_round(part.of(BEFORE)), 2),
    "Tokens/Round after": lambda part, _: number(tokens_per_round(part.of(AFTER)), 2),
}


def verdict(part: Part) -> str:
    """How acceptance and speed changed, and whether the draft was saved."""
    before, after = (percent(acceptance_rate(part.of(name))) for name in (BEFORE, AFTER))
    gain = points(speed.acceptance_gain(part, AFTER, BEFORE))
    change = f"from {before} to {after} on held-out prompts: {gain} points"
    names = {method.name for method in part.methods}
    decoding = advice(part, _with_draft(part), SUFFIX if SUFFIX in names else None)
    training = part.result.training
    if training is None or training.saved is None:
        return (
            f"**The draft did not get better**: acceptance went {change}. It was not saved. {decoding} "
            "Try more prompts, more steps or another learning rate."
        )
    return f"{decoding} Acceptance went {change}. The draft is in `{training.saved}`."


def advice(part: Part, names: Sequence[str], without: str | None = None) -> str:
    """Whether to use a draft: the speed of decoding with it by the fastest of some methods.

    Args:
        names: the methods with the draft.
        without: a method without a draft model; the draft is not recommended if this is faster.
    """
    best = speed.fastest(part, [part.result.method(name) for name in names])
    pays = None if best is None else speed.over(part, best, "engine")
    if best is None or pays is None:
        return "No answer is long enough to tell what decoding with it brings."
    what = f"{ratio(pays)} times the speed of plain decoding on the same engine"
    other = None if without is None else part.result.method(without)
    if other is not None and (rival := speed.over(part, other, "engine")) is not None and rival.value > pays.value:
        return (
            f"**Not recommended: decoding is faster without it**, {ratio(rival)} times the speed of plain decoding on "
            f"the same engine ({other.title}); with it, {ratio(pays)} times ({best.title})."
        )
    if pays.value >= LEAST_GAIN:
        return f"**Decoding with it has {what}** ({best.title})."
    slower = "is slower than without a draft" if pays.value < 1 else "hardly pays"
    return f"**Not recommended: decoding with it {slower}**, {what} ({best.title})."


def use(part: Part) -> str:
    """Code that uses a saved draft as the fastest method did; empty if none was saved."""
    result, facts = part.result, part.result.training
    if facts is None or facts.saved is None:
        return ""
    best = speed.fastest(part, [result.method(name) for name in _with_draft(part)])
    kind = result.models["target"].kind if result.encoder_decoder else "AutoModelForCausalLM"
    lines = [f'draft = {kind}.from_pretrained("{facts.saved}")']
    if facts.vocabulary is not None:
        lines.append(
            f"hf_specdec.trim_draft_head(draft)  # proposes the {facts.vocabulary:,} tokens that the target writes"
        )
    arguments = f"**inputs, {keywords(best or result.method(AFTER))}"
    call = f"model.generate({arguments})"
    lines.append(call if len(call) <= 120 else f"model.generate(\n    {arguments}\n)")  # as a formatter has it
    return "\n".join(["```python", *lines, "```"])


def _with_draft(part: Part) -> list[str]:
    """The methods that decode with the trained draft."""
    return [method.name for method in part.methods if method.name in (AFTER, AUTO)]


def training_table(result: Result) -> str:
    """One row: data, loss, cost, and the held-out loss before and after."""
    settings, facts = result.settings, result.training
    assert facts is not None
    loss = settings.loss.replace("_", " ")
    loss += f", {settings.top_k_targets} tokens stored" if settings.top_k_targets else ""
    loss += f", {settings.on_policy:.0%} on-policy" if settings.on_policy else ""
    resumed = f" (from step {facts.resumed_at} on)" if facts.resumed_at else ""
    row = {
        "Loss": loss,
        "Prompts": f"{facts.prompts:,}",
        "Answer tokens": f"{facts.tokens:,}",
        "Steps": str(facts.steps),
        "Texts/Step": str(facts.rows),
        "Learning rate": f"{facts.learning_rate:.2g}",
        "Trained parameters": f"{facts.parameters:,}",
        "Training (s)": f"{facts.seconds:.1f}{resumed}",
        "Held-out loss before": number(facts.held_out_curve[0][1], 3),
        "After": number(facts.held_out_curve[-1][1], 3),
    }
    return table([row])


def curve(result: Result) -> str:
    """A table of held-out loss and agreement during training."""
    facts = result.training
    assert facts is not None
    per_step = facts.tokens_read / max(1, facts.steps - facts.resumed_at)
    agreed = dict(facts.agreement)
    return table(
        [
            {
                "Step": str(step),
                "Tokens read": f"{step * per_step:,.0f}",
                "Held-out loss": f"{loss:.3f}",
                "Same most likely token as the target": f"{agreed[step]:.1%}" if step in agreed else "–",
            }
            for step, loss in facts.held_out_curve
        ]
    )
