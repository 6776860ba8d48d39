"""The best rows of a sweep, as a command and as keywords of generate()."""

from __future__ import annotations

import shlex

from hf_specdec.bench.figures import speed, tradeoff
from hf_specdec.bench.figures.result import MethodDict, Result
from hf_specdec.bench.reports.heading import split_of
from hf_specdec.bench.reports.markdown import ratio
from hf_specdec.config import STRATEGIES, STRATEGY_SETTINGS

# Where and in which precision a row ran, with the defaults of these arguments: they are part of its command.
_PLACES = {
    "dtype": "auto",
    "draft_dtype": "auto",
    "precision": None,
    "draft_precision": None,
    "device": None,
    "draft_device": None,
    "device_map": None,
    "offload_folder": None,
}
# Settings whose best value may lie beyond the values that were tried.
_OPEN_ENDED = (
    "num_assistant_tokens",
    "entropy_threshold",
    *(name for own in STRATEGY_SETTINGS.values() for name in own),
)


def recommendations(result: Result) -> list[str]:
    """Each strategy's fastest row as a sentence; for BiLD also the fastest without loss, and the most subtasks won."""
    lines = []
    for strategy in STRATEGIES:
        best = speed.fastest_of(result, methods_of(result, strategy))
        if best is not None:
            lines.append(_recommended(f"Fastest {strategy}", result, best))
            lines += [f"{line}." for line in at_the_edge(result, best)]
    if methods_of(result, "bild") and result["quality"]:
        best = speed.fastest_of(result, without_loss(result))
        words = "Fastest bild at no loss"
        lines.append(f"{words}: none." if best is None else _recommended(words, result, best))
        lines.append(_chosen(result))
    return lines


def methods_of(result: Result, strategy: str) -> list[MethodDict]:
    """The rows of a strategy."""
    return [method for method in result["methods"] if method["kind"] == strategy]


def without_loss(result: Result) -> list[MethodDict]:
    """BiLD's rows at which a loss of more than one point over all examples is excluded."""
    rows = methods_of(result, "bild")
    return [row for row in rows if tradeoff.verdict(result, None, row["name"], row["name"]).as_good]


def won_subtasks(result: Result, method: MethodDict) -> int | None:
    """The number of subtasks on which a row of BiLD beats the fastest speculative row with quality kept."""
    speculative = speed.fastest_of(result, methods_of(result, "speculative"))
    if speculative is None:
        return None
    return tradeoff.won(tradeoff.verdicts(result, method["name"], speculative["name"]))


def chosen_row(result: Result) -> MethodDict:
    """The row of BiLD that wins most subtasks; if there are several, the fastest of them."""
    counts = {method["name"]: won_subtasks(result, method) or 0 for method in methods_of(result, "bild")}
    most = [method for method in methods_of(result, "bild") if counts[method["name"]] == max(counts.values())]
    return speed.fastest_of(result, most) or most[0]


def command(result: Result, method: MethodDict, task: str = "benchmark") -> str:
    """The command that runs a task with a row's settings."""
    arguments = result["arguments"]
    words = ["assisted_generation.py", "--task", task, "--assisted_generation"]
    words += ["--model_name", result["models"]["target"]["name"]]
    words += ["--assistant_model", method["draft"]] if method["draft"] else []
    for name, value in method["keywords"].items():
        if (task, name) == ("subtasks", "generation_strategy"):
            continue  # it always measures both strategies
        if value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    for name, default in _PLACES.items():
        if arguments.get(name, default) != default:
            words += [f"--{name}", arguments[name]]
    if arguments["better_transformer"]:
        words.append("--better_transformer")
    if result["sampling"]:
        words.append("--do_sample")
        words += [f"--{name}={arguments[name]:g}" for name in ("temperature", "top_k", "top_p")]
    return shlex.join(words)


def keywords(method: MethodDict) -> str:
    """The same settings as keywords of generate()."""
    given = {"assistant_model": "draft"} if method["draft"] else {}
    return ", ".join([*(f"{k}={v}" for k, v in given.items()), *(f"{k}={v!r}" for k, v in method["keywords"].items())])


def at_the_edge(result: Result, best: MethodDict) -> list[str]:
    """Settings whose best value is the lowest or highest of those tried."""
    lines = []
    for name in _OPEN_ENDED:
        tried = sorted(
            {
                value
                for method in methods_of(result, best["kind"])
                if isinstance(value := method["keywords"].get(name), (int, float))
            }
        )
        value = best["keywords"].get(name)
        if len(tried) > 1 and value in (tried[0], tried[-1]):
            side = "lowest" if value == tried[0] else "highest"
            lines.append(f"--{name} {value:g} is the {side} value tried; a value beyond it may be better")
    return lines


def _recommended(what: str, result: Result, method: MethodDict) -> str:
    base = speed.baseline(result, method, "plain")
    gain = None if base is None else speed.speedup(result, method["name"], base["name"])
    over = f"{ratio(gain)} times plain generate()"
    return f"{what}: {method['title']}, {over}: `{command(result, method)}`, or `generate(…, {keywords(method)})`"


def _chosen(result: Result) -> str:
    method = chosen_row(result)
    embedded, split = result["arguments"]["dataset"] == "embedded", split_of(result)
    where = "these examples" if split is None else f"the split {split}"
    won = f"{won_subtasks(result, method)} of {len(tradeoff.labels(result))}"
    text = (
        f"Faster than speculative decoding with quality kept on most subtasks: {method['title']}, on {won}, "
        f"chosen on {where}"
    )
    reference = speed.fastest_of(result, methods_of(result, "speculative")) or method
    if (reference["draft"], reference["lookahead"]) != (method["draft"], method["lookahead"]):
        text += f" (speculative decoding was fastest with {reference['draft']}, lookahead {reference['lookahead']})"
    if embedded and split == "train":
        return f"{text}. Measure it on other examples: `{command(result, method, 'subtasks')}`"
    return f"{text}. Measure it on other examples before you rely on it."
