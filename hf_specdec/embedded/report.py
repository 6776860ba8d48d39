"""The report on the trained models: measures it as data (`report.json`) and renders it (`REPORT.md`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from hf_specdec.embedded import SUBTASKS, Example, examples, model_path, names
from hf_specdec.embedded.architectures import is_encoder_decoder, parameter_counts
from hf_specdec.embedded.evaluate import LOOKAHEAD, Agreement, Answer, agreements, answer_examples, scores

REPORT_JSON = Path(__file__).with_name("report.json")
REPORT_MD = Path(__file__).with_name("REPORT.md")
PAIRS: dict[str, tuple[str, ...]] = {
    "target": ("draft-small", "draft", "draft-large"),
    "t5-target": ("t5-draft",),
}
EXAMPLES = 24  # per subtask, of the held-out split
FEW_SHOT_EXAMPLES = 4  # per subtask, with the prompt filled up to FEW_SHOT_LENGTH tokens
FEW_SHOT_LENGTH = 512


def load(name: str) -> PreTrainedModel:
    """A model of the package in float32, in evaluation mode, on the GPU if there is one."""
    auto = AutoModelForSeq2SeqLM if is_encoder_decoder(name) else AutoModelForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return auto.from_pretrained(model_path(name), dtype=torch.float32).eval().to(device)


def held_out(n: int) -> list[Example]:
    """The first `n` held-out examples of each subtask."""
    return [example for subtask in SUBTASKS for example in examples(subtask, "heldout", n)]


def _mean_scores(chosen: Sequence[Example], answers: Sequence[Sequence[Answer]]) -> dict[str, dict[str, float]]:
    """Subtask -> measure -> mean over the examples."""
    found: dict[str, list[dict[str, float]]] = {subtask: [] for subtask in SUBTASKS}
    for example, dialogue in zip(chosen, answers, strict=True):
        found[example.subtask].append(scores(example, dialogue))
    return {
        subtask: {name: sum(values[name] for values in several) / len(several) for name in several[0]}
        for subtask, several in found.items()
    }


def _agreement(
    draft: PreTrainedModel, tokenizer: Any, chosen: Sequence[Example], answers: Sequence[Sequence[Answer]]
) -> dict[str, dict[str, int]]:
    totals = dict.fromkeys(SUBTASKS, Agreement())
    flat = [(example.subtask, answer) for example, dialogue in zip(chosen, answers, strict=True) for answer in dialogue]
    found = agreements(draft, tokenizer, [answer for _, answer in flat])
    for (subtask, _), agreement in zip(flat, found, strict=True):
        totals[subtask] += agreement
    return {subtask: asdict(agreement) for subtask, agreement in totals.items()}


def measure_pair(target_name: str, n: int, length: int | None = None) -> dict[str, Any]:
    """Scores of a target and its drafts, and how often each draft agrees with it, on `n` examples per subtask.

    With `length`, solved examples fill every prompt up to that many tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path(target_name))
    chosen = held_out(n)
    target_answers = answer_examples(load(target_name), tokenizer, chosen, length)
    lengths = [len(answer.tokens) for dialogue in target_answers for answer in dialogue]
    result: dict[str, Any] = {
        "examples_per_subtask": n,
        "prompt_length": length,
        "mean_answer_tokens": sum(lengths) / len(lengths),
        "scores": {target_name: _mean_scores(chosen, target_answers)},
        "agreement": {},
    }
    for name in PAIRS[target_name]:
        draft = load(name)
        result["scores"][name] = _mean_scores(chosen, answer_examples(draft, tokenizer, chosen, length))
        result["agreement"][name] = _agreement(draft, tokenizer, chosen, target_answers)
    return result


def _model_facts(name: str) -> dict[str, Any]:
    folder = model_path(name)
    return {
        "parameters": parameter_counts(load(name)),
        "safetensors_bytes": (folder / "model.safetensors").stat().st_size,
        "folder_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "training": json.loads((folder / "training.json").read_text()),
    }


def measure() -> dict[str, Any]:
    """Everything that the report shows."""
    return {
        "lookahead": LOOKAHEAD,
        "models": {name: _model_facts(name) for name in names()},
        "pairs": {target: measure_pair(target, EXAMPLES) for target in PAIRS},
        "few_shot": {target: measure_pair(target, FEW_SHOT_EXAMPLES, FEW_SHOT_LENGTH) for target in PAIRS},
    }


def total(agreement: dict[str, dict[str, int]]) -> Agreement:
    """All subtasks' counts together."""
    return sum((Agreement(**counts) for counts in agreement.values()), Agreement())


def total_steps(recipe: dict[str, Any]) -> int:
    """Training steps of a recipe, including those of the seedlings that it grows from."""
    earlier = total_steps(recipe["seedling"]) if recipe["seedling"] else 0
    return earlier + (recipe["until"] or recipe["steps"])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)] + [""]


_TITLES = {"exact_match": "exact match", "rougeL": "ROUGE-L", "facts": "facts"}


def _score_rows(pair: dict[str, Any], target: str) -> list[list[str]]:
    rows = []
    for subtask in SUBTASKS:
        for measure, lead in pair["scores"][target][subtask].items():
            cells = [f"{100 * lead:.1f}"]
            for name in PAIRS[target]:
                other = pair["scores"][name][subtask][measure]
                cells.append(f"{100 * other:.1f} ({100 * (lead - other):+.1f})")
            rows.append([subtask, _TITLES[measure], *cells])
    return rows


def _acceptance_rows(pair: dict[str, Any], target: str) -> list[list[str]]:
    def cells(kind: str) -> list[str]:
        found = []
        for name in PAIRS[target]:
            counts = pair["agreement"][name]
            agreement = total(counts) if kind == "all" else Agreement(**counts[kind])
            per_round = (agreement.accepted + agreement.rounds) / agreement.rounds
            found.append(f"{agreement.acceptance:.3f} / {agreement.alpha:.3f} / {per_round:.2f}")
        return found

    return [[subtask, *cells(subtask)] for subtask in SUBTASKS] + [["**all**", *cells("all")]]


def _pair_lines(report: dict[str, Any], pair: dict[str, Any], target: str) -> list[str]:
    drafts = PAIRS[target]
    length = pair["prompt_length"]
    prompts = f"prompts filled up to {length} tokens with solved examples" if length else "prompts of one example"
    return [
        f"{pair['examples_per_subtask']} held-out examples per subtask, {prompts}, answers of "
        f"{pair['mean_answer_tokens']:.1f} tokens on average. Scores from 0 to 100; in brackets the target's lead. "
        "*Facts*: the share of the reference's statements that stand word for word in the answer.",
        "",
        *_table(["Subtask", "Metric", target, *drafts], _score_rows(pair, target)),
        f"Greedy decoding with lookahead {report['lookahead']}: acceptance rate (accepted / drafted tokens) / α (share "
        "of the checked positions at which the target agrees) / tokens per round:",
        "",
        *_table(["Subtask", *drafts], _acceptance_rows(pair, target)),
    ]


def _model_rows(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, facts in report["models"].items():
        record, recipe = facts["training"]["record"], facts["training"]["recipe"]
        counts = facts["parameters"]
        target = next(t for t, drafts in PAIRS.items() if name == t or name in drafts)
        ratio = report["models"][target]["parameters"]["layers"] / counts["layers"]
        rows.append([
            name, f"{counts['layers']:,}", f"{ratio:.1f}", f"{counts['embeddings']:,}",
            f"{facts['safetensors_bytes'] / 1e6:.2f}", f"{total_steps(recipe):,}", f"{record['tokens']:,}",
            f"{record['seconds']:,.0f}", f"{record['loss']:.4f}", str(recipe["seed"]),
        ])  # fmt: skip
    return rows


def render(report: dict[str, Any]) -> str:
    """`REPORT.md` from `report.json`."""
    weights, folders = (
        sum(facts[key] for facts in report["models"].values()) / 1e6 for key in ("safetensors_bytes", "folder_bytes")
    )
    head = ["Model", "Layer parameters", "Target / model", "Embedding parameters", "safetensors (MB)", "Steps",
            "Tokens trained", "Seconds", "Last loss", "Seed"]  # fmt: skip
    versions = {
        " and ".join(f"{name} {version}" for name, version in facts["training"]["versions"].items())
        for facts in report["models"].values()
    }
    lines = [
        "# The embedded models",
        "",
        "Generated by `python -m hf_specdec.embedded.train --report_only`; the data is in `report.json`.",
        "",
        *_table(head, _model_rows(report)),
        f"All weights take {weights:.2f} MB, with tokenizers and configurations {folders:.2f} MB. "
        f"Trained with {'; '.join(sorted(versions))}. *Target / model* compares the layer parameters. Seconds are "
        "wall-clock time on shared CPU cores, with several models training at once.",
        "",
    ]
    for key, title in (("pairs", "Held-out split"), ("few_shot", "Held-out split, long prompts")):
        for target in PAIRS:
            lines += [f"## {title}: {target}", "", *_pair_lines(report, report[key][target], target)]
    return "\n".join(lines).rstrip() + "\n"


def write(report: dict[str, Any]) -> None:
    """Write both files."""
    REPORT_JSON.write_text(json.dumps(report, indent=1) + "\n")
    REPORT_MD.write_text(render(report))
