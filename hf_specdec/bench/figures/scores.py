"""How good the outputs are: each method's texts against the references, as data for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEASURES = ("bleu", "rouge1", "rouge2", "rougeL", "exact_match")


def scores(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry a method and subtask, and one with subtask None over all: `MEASURES`, and of how many `examples`.

    Only questions with references count; without any the list is empty. Texts are those of the first repeat.
    """
    references = {prompt["index"]: prompt["references"] for prompt in result["prompts"] if prompt["references"]}
    if not references:
        return []
    # Here because it takes seconds.
    from hf_specdec.bench.figures.quality import quality

    labels = {prompt["index"]: prompt["label"] for prompt in result["prompts"]}
    found = []
    for method in result["methods"]:
        texts = {
            run["prompt"]: run["text"]
            for run in result["runs"]
            if run["method"] == method["name"] and run["repeat"] == 0 and run["prompt"] in references
        }
        for subtask in [None, *dict.fromkeys(labels[index] for index in texts)]:
            chosen = [index for index in texts if subtask in (None, labels[index])]
            measured = quality([texts[index] for index in chosen], [references[index] for index in chosen])
            entry = {"method": method["name"], "subtask": subtask, "examples": len(chosen)}
            found.append(entry | {name: round(measured[name], 6) for name in MEASURES})
    return found
