"""The best rows of a sweep, as a command and as keywords of generate()."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from hf_specdec.bench.figures import quality, speed
from hf_specdec.bench.figures.frames import Part
from hf_specdec.bench.records import Method, Result
from hf_specdec.bench.reports.markdown import ratio
from hf_specdec.bench.settings import Settings
from hf_specdec.config import STRATEGIES, STRATEGY_SETTINGS

# Arguments on placement and precision, which a row's command repeats.
_PLACES = (
    "dtype", "draft_dtype", "precision", "draft_precision", "device", "draft_device", "device_map", "offload_folder",
)  # fmt: skip
# Settings whose best value may lie outside the tried range.
_OPEN_ENDED = (
    "num_assistant_tokens",
    "entropy_threshold",
    *(name for own in STRATEGY_SETTINGS.values() for name in own),
)


def recommendations(part: Part) -> list[str]:
    """Sentences on each strategy's fastest row; for BiLD also the fastest without loss and the most subtasks won."""
    lines = []
    for strategy in STRATEGIES:
        rows = [method for method in part.methods if method.kind == strategy]
        best = speed.fastest(part, rows)
        if best is not None:
            lines += [_recommended(f"Fastest {strategy}", part, best), *at_the_edge(rows, best)]
    bild = [method for method in part.methods if method.kind == "bild"]
    if bild and part.result.quality:
        safe = [method for method in bild if quality.verdict(part, method.name, method.name).as_good]
        best = speed.fastest(part, safe)
        words = "Fastest bild at no loss"
        lines.append(f"{words}: none." if best is None else _recommended(words, part, best))
        lines += _chosen(part, bild)
    return lines


def command(result: Result, method: Method, task: str = "benchmark") -> str:
    """The command that runs a task with a row's settings."""
    settings, defaults = result.settings, Settings()
    words = ["assisted_generation.py", "--task", task, "--assisted_generation"]
    words += ["--model_name", result.models["target"].name]
    words += ["--assistant_model", method.draft] if method.draft else []
    for name, value in method.keywords.items():
        if (task, name) == ("subtasks", "generation_strategy"):
            continue  # it always measures both strategies
        if value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    for name in _PLACES:
        if (value := getattr(settings, name)) != getattr(defaults, name):
            words += [f"--{name}", str(value)]
    words += ["--better_transformer"] if settings.better_transformer else []
    if settings.sampling:
        words.append("--do_sample")
        words += [f"--{name}={value:g}" for name, value in settings.given_sampling().items()]
    return shlex.join(words)


def keywords(method: Method) -> str:
    """A row's settings as keywords of generate()."""
    given = ["assistant_model=draft"] if method.draft else []
    # In double quotes, as formatters write them.
    words = (f"{key}={json.dumps(one) if isinstance(one, str) else one}" for key, one in method.keywords.items())
    return ", ".join([*given, *words])


def at_the_edge(rows: Sequence[Method], best: Method) -> list[str]:
    """Sentences on settings whose best value is the lowest or highest tried.

    Args:
        rows: the rows of the same strategy.
    """
    lines = []
    for name in _OPEN_ENDED:
        values = (method.keywords.get(name) for method in rows if method.kind == best.kind)
        tried = sorted({value for value in values if isinstance(value, (int, float))})
        value = best.keywords.get(name)
        if len(tried) > 1 and value in (tried[0], tried[-1]):
            side = "lowest" if value == tried[0] else "highest"
            lines.append(f"--{name} {value:g} is the {side} value tried; a value beyond it may be better.")
    return lines


def _recommended(what: str, part: Part, method: Method) -> str:
    over = f"{ratio(speed.over(part, method, 'plain'))} times plain generate()"
    return f"{what}: {method.title}, {over}: `{command(part.result, method)}`, or `generate(…, {keywords(method)})`"


def _chosen(part: Part, bild: Sequence[Method]) -> list[str]:
    """A sentence on the row of BiLD that wins most subtasks; the fastest of equals."""
    settings, split = part.result.settings, part.result.split
    reference = speed.fastest(part, [method for method in part.methods if method.kind == "speculative"])
    if reference is None:
        return []
    counts = {method.name: quality.won(part, method.name, reference.name) or 0 for method in bild}
    most = [method for method in bild if counts[method.name] == max(counts.values())]
    method = speed.fastest(part, most) or most[0]
    where = "these examples" if split is None else f"the split {split}"
    if not counts[method.name]:
        return [f"Faster than speculative decoding with quality kept: none, on no subtask of {where}."]
    text = (
        f"Faster than speculative decoding with quality kept on most subtasks: {method.title}, on "
        f"{counts[method.name]} of {len(part.labels)}, chosen on {where}"
    )
    if (reference.draft, reference.lookahead) != (method.draft, method.lookahead):
        text += f" (speculative decoding was fastest with {reference.draft}, lookahead {reference.lookahead})"
    if settings.dataset == "embedded" and split == "train":
        return [f"{text}. Measure it on other examples: `{command(part.result, method, 'subtasks')}`"]
    return [f"{text}. Measure it on other examples before you rely on it."]
