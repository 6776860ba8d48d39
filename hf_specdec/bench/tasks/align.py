"""The task `align`: fine-tunes a draft on what its target writes, and judges it on prompts that it has not seen."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_specdec.bench.aligning.answers import answers_folder, target_answers
from hf_specdec.bench.aligning.batches import shared_vocabulary
from hf_specdec.bench.figures.alignment import AFTER, BEFORE, acceptance_gain
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.questions import Question
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import LoadedPair, load_pair, with_draft
from hf_specdec.bench.reports.tables import align as align_tables
from hf_specdec.bench.running.methods import chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.run_session import RunSession, finish
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender

Dialogues = list[list[Question]]

MOST_HELD_OUT = 64  # dialogues
_HELD_OUT_SHARE = 10  # one dialogue in so many is held out, where a data set has no split for it


def run_align(settings: Settings, shared: Processes) -> None:
    """Answers, trains, judges; a draft that is accepted more often than before is saved as `<name>-aligned`.

    An interrupted run goes on where it stopped. Raises `BenchError` for what the user can put right.
    """
    check_arguments(settings)
    learned, held_out = prompts(settings)
    judging = replace(settings, batch_sizes=(1,))
    # Refuses here what would otherwise be refused after the training.
    RunSession(judging, shared).journal.close()
    pair = load_pair(settings)
    saved = destination(settings, pair)
    check_pair(settings, pair)

    folder = answers_folder(settings, pair)
    datasets = {}
    for name, dialogues in (("learned", learned), ("held-out", held_out)):
        groups = collecting.batches(dialogues, settings.batch_size)
        datasets[name] = target_answers(folder / name, settings, pair, groups, shared)

    # Here because it takes seconds, and needs accelerate.
    from hf_specdec.bench.aligning.training import train

    assert pair.draft is not None and pair.draft_name is not None
    place = settings.output_dir / f"{results.stem(settings)}-{_digest(settings, folder)}"
    copy = with_draft(pair, pair.draft_name, settings, pair.draft.device).draft
    assert copy is not None
    facts = train(settings, pair, copy, datasets["learned"], datasets["held-out"], place, shared)

    aligned = replace(with_draft(pair, str(place / "draft"), settings, pair.draft.device), draft_name=str(saved))
    result = collecting.collect(judging, contenders(judging, pair, aligned), held_out, shared)
    if result is None:
        return
    gain = acceptance_gain(result)
    better = gain is not None and gain.value > 0
    result["alignment"] = facts | {
        "prompts": len(datasets["learned"]),
        "tokens": sum(map(len, datasets["learned"]["answer"])),
        "rows": settings.batch_size * shared.count,
        "answers": str(folder),
        "saved": str(saved) if better else None,
    }
    if better:
        os.replace(place / "draft", saved)
    finish(result, judging)
    shutil.rmtree(place)
    sys.stdout.write(align_tables.render(result))


def check_arguments(settings: Settings) -> None:
    """Raises `BenchError` for what can't be had, before anything is loaded."""
    for package, wanted, argument in (
        ("accelerate", True, "--task: 'align'"),
        ("peft", settings.lora_rank is not None, f"--lora_rank: {settings.lora_rank}"),
    ):
        if wanted and find_spec(package) is None:
            raise BenchError(f"{argument} needs {package}, which is not installed; pip install 'hf_specdec[align]'")
    if synthetic.is_synthetic(settings.model_name):
        raise BenchError(f"--model_name: {settings.model_name!r} has random weights; give a target that was trained")
    if settings.drafter not in (None, "model"):
        raise BenchError(f"--drafter: {settings.drafter!r} is no model that could be trained; leave it out")
    if settings.draft_precision is not None:
        raise BenchError(f"--draft_precision: {settings.draft_precision!r} can't be trained; leave it out")
    if settings.loss == "cross_entropy":
        for argument in ("top_k_targets", "on_policy"):
            if value := getattr(settings, argument):
                raise BenchError(
                    f"--{argument}: {value} asks for the target's distributions, which --loss cross_entropy does not "
                    "use; leave it out, or choose another loss"
                )
    if settings.on_policy and settings.top_k_targets:
        raise BenchError(
            f"--top_k_targets: {settings.top_k_targets} stores judgements of the target's answers alone, and "
            f"--on_policy {settings.on_policy:g} judges the draft's too; give one of them"
        )


def check_pair(settings: Settings, pair: LoadedPair) -> None:
    """Raises `BenchError` for models that can't be aligned, or not with these arguments."""
    assert pair.draft_tokenizer is not None
    if pair.draft_tokenizer.get_vocab() != pair.tokenizer.get_vocab():
        raise BenchError(
            f"--assistant_model: {pair.draft_name!r} has another vocabulary than the target {pair.target_name!r}; "
            "give a draft that shares the target's tokenizer"
        )
    if (settings.top_k_targets or 0) > (most := shared_vocabulary(pair)):
        raise BenchError(f"--top_k_targets: {settings.top_k_targets} exceeds the vocabulary; give at most {most}")


def destination(settings: Settings, pair: LoadedPair) -> Path:
    """Where the aligned draft goes; raises `BenchError` where something lies there."""
    path = settings.output_dir / f"{Path(str(pair.draft_name)).name}-aligned"
    if path.exists():
        raise BenchError(
            f"--output_dir: {str(path)!r} is there already and is not overwritten; move it away, or give another folder"
        )
    return path


def prompts(settings: Settings) -> tuple[Dialogues, Dialogues]:
    """Dialogues to learn from, and held-out ones; no prompt is in both.

    The embedded data has a split for each. Of other data every tenth dialogue is held out, at most `MOST_HELD_OUT`.

    Raises:
        BenchError: see `questions.dialogues`; or there are too few.
    """
    if questions.is_embedded(settings.dataset):
        if settings.split is not None:
            raise BenchError(
                f"--split: {settings.split!r} can't be chosen for the embedded data: align learns from train and is "
                "judged on heldout; leave it out"
            )
        kinds = len(questions.embedded_subtasks(settings.dataset))
        judged = replace(settings, split="heldout", limit=MOST_HELD_OUT // kinds)
        return questions.dialogues(replace(settings, split="train")), questions.dialogues(judged)
    split = None if questions.split_of(settings) is None else settings.split or "train"
    found = questions.dialogues(replace(settings, split=split))
    count = min(MOST_HELD_OUT, max(1, len(found) // _HELD_OUT_SHARE))
    held_out = [found[number * len(found) // count] for number in range(count)]
    texts = {dialogue[-1].turns for dialogue in held_out}
    learned = [dialogue for dialogue in found if dialogue[-1].turns not in texts]
    if not learned:
        raise BenchError(f"--dataset: {settings.dataset!r} has too few different prompts to hold one out; give more")
    return learned, held_out


def contenders(settings: Settings, pair: LoadedPair, aligned: LoadedPair) -> list[Contender]:
    """Plain decoding, and speculative decoding with the draft before and after."""
    found = [Contender(plain(), pair), Contender(plain_on_engine(chosen_keywords(settings, pair)), pair)]
    for name, one, words in ((BEFORE, pair, "draft as it was"), (AFTER, aligned, "aligned draft")):
        method = ours("speculative", chosen_keywords(settings, one), one, name=name)
        found.append(Contender(replace(method, title=f"{method.title}, {words}"), one))
    return found


def _digest(settings: Settings, answers: Path) -> str:
    told: dict[str, Any] = settings.to_dict() | {"output_dir": answers.name}
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
