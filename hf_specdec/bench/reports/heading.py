"""What every report begins and ends with: the set-up of the run, and remarks on how it went."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from hf_specdec.bench.figures import speed
from hf_specdec.bench.reports.markdown import percent

Result = Mapping[str, Any]

# Tasks that are measured on questions of a data set.
DATA_TASKS = ("subtasks", "sweep", "ablation")

# Repeats of the same work that differ by more than this share of their median were disturbed.
_CALM = 0.25


def heading(result: Result) -> str:
    """Title, models, machine, versions and how tokens were chosen."""
    arguments = result["arguments"]
    how = "greedy"
    if result["sampling"]:
        options = ("temperature", "top_k", "top_p", "seed")
        how = "sampling (" + ", ".join(f"{name} {arguments[name]:g}" for name in options) + ")"
    models = [
        f"- {role}: {model['name']} ({model['class']}, {model['parameters'] / 1e6:.1f}M parameters, "
        f"{model['dtype']}, {model['device']}, {model['attention']} attention)"
        for role, model in result["models"].items()
    ]
    # Of a sweep's drafts the first is described above.
    further = _values(result, "draft")[1:] if result["task"] == "sweep" else []
    models += [f"- further drafts: {', '.join(further)}"] if further else []
    environment = result["environment"]
    packages = environment["packages"]
    where = ", ".join([environment["cpu"], *environment["gpus"]])
    count = environment["torch_threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}"
    if result.get("processes", 1) > 1:
        threads += f" in each of {result['processes']} processes that ran at the same time"
    models.append(f"- on: {where}, {threads}; torch {packages['torch']}, transformers {packages['transformers']}")
    lookahead = f", lookahead {', '.join(_values(result, 'lookahead'))}" if "draft" in result["models"] else ""
    repeats = f"{arguments['repeats']} repeats" if arguments["repeats"] > 1 else "1 repeat"
    if result["task"] in DATA_TASKS:
        models.append(f"- data: {_data(result)}")
    shape = f"at most {arguments['max_new_tokens']} new tokens{lookahead}, batch size 1"
    if result["task"] == "engines":
        lengths, sizes = (", ".join(map(str, arguments[name])) for name in ("prompt_lengths", "batch_sizes"))
        shape = f"{arguments['max_new_tokens']} new tokens behind prompts of {lengths}, batch sizes {sizes}"
    models.append(f"- {how}, {shape}, {repeats}")
    return f"# {result['task'].capitalize()}\n\n" + "\n".join(models)


def _values(result: Result, name: str) -> list[str]:
    """Of a setting: all that a sweep tried, in order; elsewhere the one that the run had."""
    if result["task"] != "sweep":
        return [str(result[name])]
    return list(dict.fromkeys(str(method[name]) for method in result["methods"] if name in method))


def split_of(result: Result) -> str | None:
    """The split of the data that was measured; None for a file, which has none."""
    arguments = result["arguments"]
    if "split" in result or arguments["dataset"] == "spec_bench":
        found: str | None = result.get("split")
        return found
    # Results of before the split had a key of its own.
    return arguments["split"] or ("heldout" if arguments["dataset"] == "embedded" else "test")


def _data(result: Result) -> str:
    split = split_of(result)
    of_split = "" if split is None else f", split {split}"
    count = len(result["prompts"])
    return f"{result['arguments']['dataset']}{of_split}, {count} answer{'s' if count > 1 else ''} of each method"


def remarks(result: Result) -> list[str]:
    """What went otherwise than asked for, and a warning where times can't be trusted."""
    warning = _unrest(result)
    return [*result["notes"], warning] if warning else list(result["notes"])


def _unrest(result: Result) -> str:
    """A warning where repeats of the same work took very different times, or there are none; empty otherwise."""
    spreads = []
    for method in result["methods"]:
        for prompt in result["prompts"]:
            runs = [r for r in result["runs"] if (r["method"], r["prompt"]) == (method["name"], prompt["index"])]
            if len(runs) > 1:
                spreads.append(speed.spread(runs))
    if not spreads:
        return "Each figure rests on a single run: one stall of the machine can double it. Raise --repeats."
    if median(spreads) <= _CALM:
        return ""
    return (
        f"Times are unsteady: repeats of the same work differ by {percent(median(spreads))} "
        "(median). Close other programs, or raise --repeats."
    )
