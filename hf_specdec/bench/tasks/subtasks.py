"""Compares every way of decoding on eight kinds of text, in speed and quality."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from statistics import mean

from hf_specdec.bench import results
from hf_specdec.bench.figures import quality, speed
from hf_specdec.bench.figures.frames import Part, alpha, examples, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import Columns, method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks, sampling_of
from hf_specdec.bench.reports.markdown import capital, number, points, ratio, table
from hf_specdec.bench.running.measuring import measured_questions
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted_refusal, prompt_lookup
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks.benchmark import baselines

# Short names of the kinds of methods, as printed to the terminal.
SHORT = {
    "plain": "AS", "none": "AS, our loop", "speculative": "SPS", "bild": "BiLD", "assisted": "HF assisted",
    "ensemble": "HF ensemble", "lookup": "Lookup",
}  # fmt: skip
MEASURES = {
    "bleu": "BLEU", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "exact_match": "Exact match",
    "facts": "Facts",
}  # fmt: skip
NO_LOSS = (
    "No loss: a loss of more than one point is excluded by all measures, even if one further question lost all 100 "
    f"points; where no answer changes, this takes {quality.questions_needed(quality.MOST_LOSS)} questions."
)
LOSS = (
    "Differences are in points, method − plain generate() on the same examples, with their 95% interval (paired "
    "bootstrap over questions). Where no answer changes it has no width: none of these examples lost, others may."
)
BILD = (
    "Speed: the rate of BiLD / that of speculative decoding. Faster: the interval lies above 1. Differences are to "
    f"plain generate(). {NO_LOSS} Open: faster, and no answer is worse by any measure, but the questions are too few."
)
DRAWN = (
    "Outputs are sampled, with the same seed for the same example in every repeat, and quality is that of one output "
    "per example. Lossless methods have the quality of plain decoding in expectation and differ from it by chance."
)


def run(settings: Settings, shared: Processes) -> None:
    """Measure, write the result and its report into `settings.output_dir`, print the lines of each subtask."""
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    result = measured_questions(settings, compared(settings, pair), dialogues, shared)
    if result is None:
        return
    result.notes += filter(None, [assisted_refusal(settings, pair)])
    result.quality = quality.scores(result)
    results.finish(result, render)
    sys.stdout.write(terminal(whole(result)))


def compared(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """The baselines, speculative decoding, BiLD, and transformers' prompt lookup."""
    keywords = chosen_keywords(settings, pair)
    strategies = [ours(strategy, keywords, pair) for strategy in ("speculative", "bild")]
    return [*baselines(settings, pair), prompt_lookup(settings, pair), *strategies]


def render(result: Result) -> list[Block]:
    """Compose the report."""
    part, drawn = whole(result), DRAWN if result.settings.sampling else ""
    groups = by_subtask(part)
    found: list[Block] = [heading(part)]
    found += section(
        "Overall",
        columns.SPEED,
        columns.MACRO_LEGEND,
        method_table({"": part}, columns.speed_columns(result, macro=True)),
    )
    found += ["## Speedup by subtask"]
    for which in speed.BASELINES:
        if shown := [method for method in columns.drafted(part) if speed.baseline(part, method, which)]:
            found += [f"### Over {columns.baseline_title(result, which)}", speedup_table(groups, shown, which)]
    found.append(Picture("by-subtask", "gains.by_subtask", (part,)))
    rounds = method_table(groups, columns.ROUNDS, group="Subtask", methods=columns.drafted)
    found += section("Rounds", columns.ROUNDS_LEGEND, rounds)
    found.append(Picture("acceptance-by-position", "lookahead.by_position", (part,)))
    found += section("Cold cost", columns.COLD_LEGEND, method_table({"": part}, columns.COLD))
    if _both(part):
        found += ["## BiLD and speculative decoding", BILD, bild_table(groups), count_line(part)]
    if result.quality:
        found += ["## Quality against the references, 0 to 100", drawn, quality_table(result)]
        found += [
            "### Differences to plain generate()",
            LOSS,
            method_table({"": part}, _differences(), methods=_others),
        ]
        found.append(Picture("speed-and-quality", "quality.speed_against_quality", (part,)))
    if not result.settings.sampling:
        found += ["## Outputs that differ from plain generate()", divergence_table(part)]
    return [*found, *remarks(part, average_alpha(part))]


def by_subtask(part: Part) -> Mapping[str, Part]:
    """Group calls by subtask, plus all together."""
    labels = part.labels if len(part.labels) > 1 else []
    return {**{label: part.where(label=label) for label in labels}, "overall": part}


def speedup_table(groups: Mapping[str, Part], shown: list[Method], which: str) -> str:
    """A table of micro speedups over a baseline: one row per subtask, one column per method."""
    rows = []
    for name, part in groups.items():
        cells = {capital(method.title): ratio(speed.over(part, method, which)) for method in shown}
        rows.append({"Subtask": name, "n": str(examples(part.calls)), **cells})
    return table(rows)


def _others(part: Part) -> list[Method]:
    return part.methods[1:]


def _differences() -> Columns:
    return {**columns.METHOD, **columns.N, **{MEASURES[name]: columns.quality_change(name) for name in quality.JUDGED}}


def quality_table(result: Result) -> str:
    """A table of the quality of outputs against the references: one row per subtask and method."""
    order = [*whole(result).labels, None]
    rows = []
    for score in sorted(result.quality, key=lambda one: order.index(one.subtask)):
        row = {"Subtask": score.subtask or "overall", "Method": capital(result.method(score.method).title)}
        measures = {title: number(getattr(score, name), 1) for name, title in MEASURES.items()}
        rows.append({**row, "n": str(score.examples), **measures})
    return table(rows)


def divergence_table(part: Part) -> str:
    """One row per method: how many outputs differ from plain decoding's, where first, and by what margin."""
    rows = []
    for method in part.methods[1:]:
        found = [one.divergences[method.name] for one in part.result.prompts if method.name in one.divergences]
        margins = [one.margin for one in found if one.margin is not None]
        rows.append(
            {
                "Method": capital(method.title),
                "Outputs that differ": f"{len(found)} of {len(part.result.prompts)}",
                "First difference at token (mean)": number(mean(o.position + 1 for o in found) if found else None, 1),
                "Smallest margin (logits)": f"{min(margins):.3g}" if margins else "–",
                "Largest margin (logits)": f"{max(margins):.3g}" if margins else "–",
            }
        )
    return table(rows)


def average_alpha(part: Part) -> str:
    """A line with α over all examples, for each method that reports it."""
    found = [(_short(part, method), alpha(part.of(method.name))) for method in part.methods]
    values = [f"{name} {value:.3f}" for name, value in found if value is not None]
    return "Average alpha: " + (", ".join(values) if values else "– (nothing was drafted)")


def bild_table(groups: Mapping[str, Part]) -> str:
    """One row per subtask: BiLD's speed over speculative decoding, its quality difference to plain, the verdict."""
    rows = []
    for name, part in groups.items():
        found = quality.verdict(part, "bild", "speculative")
        row = {"Subtask": name, "n": str(examples(part.calls)), "Speed of BiLD / speculative": ratio(found.speed)}
        for measure in quality.JUDGED:
            row[f"{MEASURES[measure]}, BiLD − plain"] = points((found.differences or {}).get(measure))
        rows.append({**row, "Faster at no loss": found.words})
    return table(rows)


def count_line(part: Part) -> str:
    """A sentence on how many subtasks BiLD is faster with quality kept, and at no loss."""
    found = [quality.verdict(part.where(label=label), "bild", "speculative") for label in part.labels]
    if all(one.differences is None for one in found):
        return "Whether BiLD loses quality is unknown: the data have no references."
    excluded = sum(one.faster and one.as_good for one in found)
    without = sum(not one.known for one in found)
    rest = f"; {without} cannot be judged, for lack of references or rates" if without else ""
    return (
        f"{part.result.method('bild').title} is faster than speculative decoding on {sum(one.won for one in found)} of "
        f"{len(found)} subtasks with no answer worse, or a loss of more than one point excluded (excluded on "
        f"{excluded}){rest}."
    )


def _both(part: Part) -> bool:
    return {"bild", "speculative"} <= {method.name for method in part.methods}


def terminal(part: Part) -> str:
    """The terminal's text: configuration, one line per method overall and by subtask, average alpha."""
    settings, models = part.result.settings, part.result.models
    temperature = f"{sampling_of(part.result)['temperature']:g}"
    lines = [
        "Configuration",
        f"  target:       {models['target'].name}",
        f"  draft:        {models['draft'].name if 'draft' in models else 'none'}",
        f"  temperature:  {temperature if settings.sampling else '0 (greedy)'}",
        f"  max tokens:   {settings.max_new_tokens}",
        f"  gamma:        {part.result.lookahead}",
        f"  thresholds:   fallback {settings.fallback_threshold:g}, rollback {settings.rollback_threshold:g}",
        "  tokens/sec:   after the first delivery, micro (all tokens / all seconds)",
    ]
    for label in (None, *part.labels):
        lines.append("")
        here = part.where(label=label)
        rate = partial(_rate, here)
        for method in (one for one in here.methods if one.kind != "plain"):
            gain = speed.over(here, method, "plain")
            lines.append(
                f"{label or 'Overall'} Result: AS: {rate('plain')} tokens/sec, {_short(part, method)}: "
                f"{rate(method.name)} tokens/sec -> {'–' if gain is None else f'{gain.value:.2f}'} X Speedup"
            )
    lines += ["", average_alpha(part), *([count_line(part)] if _both(part) else [])]
    lines += [str(block) for block in remarks(part)[1:]]
    return "\n".join([*lines, _where(settings)]) + "\n"


def _short(part: Part, method: Method) -> str:
    """A method's short name, with the end of its title where several have the same."""
    alone = sum(one.kind == method.kind for one in part.methods) == 1
    return SHORT[method.kind] + ("" if alone else f", {method.title.rpartition(', ')[2]}")


def _rate(part: Part, method: str) -> str:
    return number(speed.decode_rate(part.of(method)), 1)


def _where(settings: Settings) -> str:
    return f"Full report: {settings.output_dir / results.stem(settings)}.md"
