"""What every report begins and ends with: the set-up of the run, and remarks on how it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.result import Result
from hf_specdec.bench.reports.markdown import percent

# Tasks that are measured on questions of a data set.
DATA_TASKS = ("subtasks", "sweep", "ablation", "tune", "align")

# Repeats of the same work that differ by more than this share of their median were disturbed.
_CALM = 0.25


def heading(result: Result) -> str:
    """Title, models, machine, versions, data and settings."""
    lines = [_model(role, model) for role, model in result["models"].items()]
    described = [model["name"] for model in result["models"].values()]
    further = [name for name in _values(result, "draft") if name not in described]
    lines += [f"- further drafts: {', '.join(further)}"] if further else []
    lines.append(_machine(result))
    if result["task"] in DATA_TASKS:
        lines.append(_data(result))
    if result["task"] == "engines":
        lines.append(_prompts(result))
    lines.append(_shape(result))
    return f"# {result['task'].capitalize()}\n\n" + "\n".join(lines)


def remarks(result: Result) -> list[str]:
    """Notes of the run, and warnings where its times can't be trusted."""
    found = [speed.busy(result), speed.unsettled(result), _unrest(result)]
    return [*result["notes"], *(line for line in found if line)]


def joined(parts: Iterable[str], lines: Sequence[str]) -> str:
    """The parts of a report and, where there are any, its remarks."""
    listed = "\n".join(f"- {line}" for line in lines)
    return "\n\n".join([*parts, *([f"## Remarks\n\n{listed}"] if lines else [])]) + "\n"


def split_of(result: Result) -> str | None:
    """The split of the data that was measured; None for a file, which has no splits."""
    found: str | None = result.get("split")
    return found


def _model(role: str, model: Mapping[str, Any]) -> str:
    return (
        f"- {role}: {model['name']} ({model['class']}, {model['parameters'] / 1e6:.1f}M parameters, "
        f"{model['dtype']}, {model['device']}, {model['attention']} attention)"
    )


def _machine(result: Result) -> str:
    environment = result["environment"]
    packages, count = environment["packages"], environment["torch_threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}"
    if result.get("processes", 1) > 1:
        threads += f" in each of {result['processes']} parallel processes"
    where = ", ".join([processor(environment), *environment["gpus"]])
    versions = f"torch {packages['torch']}, transformers {packages['transformers']}"
    return f"- machine: {where}, {threads}; {versions}"


def processor(environment: Mapping[str, Any]) -> str:
    """Its name and widest instructions, which files of earlier versions don't have."""
    instructions = environment.get("instructions")
    return f"{environment['cpu']} ({instructions})" if instructions else str(environment["cpu"])


def _data(result: Result) -> str:
    split, count = split_of(result), len(result["prompts"])
    of_split = "" if split is None else f", split {split}"
    return f"- data: {result['arguments']['dataset']}{of_split}, {count} example{'s' if count > 1 else ''}"


def _prompts(result: Result) -> str:
    """How many prompts of each length were decoded, by batch size where that differs."""
    lengths = {prompt["index"]: prompt["tokens"] for prompt in result["prompts"]}
    sizes: dict[str, list[str]] = {}
    for batch in speed.batch_sizes(result):
        decoded = {index for call in speed.calls_of(result, batch=batch) for index in call.prompts}
        counts = Counter(lengths[index] for index in decoded)
        words = " and ".join(f"{count} of {tokens} tokens" for tokens, count in sorted(counts.items()))
        sizes.setdefault(words, []).append(str(batch))
    if len(sizes) == 1:
        return f"- prompts: {next(iter(sizes))}"
    return "- prompts: " + "; ".join(f"{words} at batch size {', '.join(some)}" for words, some in sizes.items())


def _shape(result: Result) -> str:
    arguments, sizes = result["arguments"], sorted({call.batch for call in result["calls"]}) or [1]
    how = "greedy"
    if result["sampling"]:
        options = ("temperature", "top_k", "top_p", "seed")
        how = "sampling (" + ", ".join(f"{name} {arguments[name]:g}" for name in options) + ")"
    parts = [how, f"at most {arguments['max_new_tokens']} new tokens"]
    if lookaheads := _values(result, "lookahead"):
        parts.append(f"lookahead {', '.join(lookaheads)}")
    parts.append(f"batch size {', '.join(map(str, sizes))}")
    if result["task"] == "tune":
        return f"- {', '.join(parts)}, within {arguments['minutes']:g} minutes"
    repeats = arguments["repeats"]
    return f"- {', '.join(parts)}, {repeats} repeat{'s' if repeats > 1 else ''}"


def _values(result: Result, name: str) -> list[str]:
    """All values of a setting among this package's drafting methods, in order."""
    ours = [m for m in result["methods"] if speed.drafts_in_our_loop(m) and m.get("role") != "floor"]
    found = dict.fromkeys(method[name] for method in ours if method.get(name) is not None)
    return [str(value) for value in sorted(found, key=lambda value: (isinstance(value, str), value))]


def _unrest(result: Result) -> str | None:
    """A warning if repeats of the same work took very different times, or if there are no repeats."""
    if not result["calls"]:
        return None
    spread = speed.spread(result["calls"])
    if spread is None:
        return "Each figure rests on a single run: one stall of the machine can double it. Raise --repeats."
    if spread <= _CALM:
        return None
    return (
        f"Times are unsteady: repeats of the same work differ by {percent(spread)} (median). "
        "Close other programs, or raise --repeats."
    )
