"""Trains a draft on its target's answers, and judges it on held-out prompts.

The task `draft` makes the draft out of some of the target's layers; `align` fine-tunes one that exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.aligning.batches import shared_vocabulary
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.gathering import ANSWERING, MOST_HELD_OUT, Answers, Dialogues, answered
from hf_specdec.bench.aligning.own_prompts import own_questions
from hf_specdec.bench.aligning.shape import check_target, cut_draft
from hf_specdec.bench.aligning.shapes import Trials
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.questions import OWN
from hf_specdec.bench.journal import Journal
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import LoadedPair, gguf_path, load_pair, with_draft
from hf_specdec.bench.models.names import is_gguf, short_name, stem
from hf_specdec.bench.records import Result, Training, as_json
from hf_specdec.bench.reports import columns, trained_drafts
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.trained_drafts import AFTER, AUTO, BEFORE, SUFFIX
from hf_specdec.bench.running.measuring import measured_questions
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.subtasks import by_subtask

GGUF = "draft.gguf"  # in the draft's folder, for targets from GGUF files
_HELD_OUT_SHARE = 0.1  # of the dialogues, if a data set has no split for it
# Of drafts that are made:
_TRYING = 0.1  # of the time, for shapes
_ROWS = 8  # texts of a training step
_COVERED = 0.98  # of the answers' tokens are among those that the draft may propose


def run(settings: Settings, shared: Processes) -> None:
    """Answer, train and judge; save a draft that was made, or that is accepted more often than before.

    An interrupted run continues where it stopped.
    """
    check_arguments(settings)
    judged = judging(settings)
    # Raises now what would otherwise be raised after the training.
    Journal(judged, stem(judged), shared.count)
    given, asked = ([], []) if writes_prompts(settings) else prompts(settings)
    pair = load_pair(settings)
    saved = destination(settings, pair)
    check_models(settings, pair)
    answers = answered(settings, pair, given, asked, shared)
    if not asked and settings.dataset == OWN:
        asked = own_questions(answers.folder / "prompts.jsonl", answers.held_out["index"])
    asked = asked or questions.dialogues(settings)
    place = workplace(settings, answers.folder)
    trained = _given_draft if settings.task == "align" else _made_draft
    before, facts, notes = trained(settings, pair, answers, place, shared)
    assert before.draft is not None
    after = replace(with_draft(pair, str(place / "draft"), settings, before.draft.device), draft_name=str(saved))
    result = measured_questions(judged, contenders(judged, before, after), asked, shared)
    if result is None:
        return
    gain = speed.acceptance_gain(whole(result), AFTER, BEFORE)
    keep = settings.task == "draft" or (gain is not None and gain.value > 0)
    result.training = replace(facts, answers=str(answers.folder), saved=str(saved) if keep else None)
    if settings.task == "draft":
        minutes = Clock(answers.folder / "seconds", 1).before / 60
        notes = [f"The target answered for {minutes:.0f} minutes, all starts together.", *notes]
    result.notes += notes
    if keep:
        if settings.task == "draft" and settings.draft_dtype != "auto":
            judged_draft = with_draft(pair, str(place / "draft"), settings, pair.target.device, trim=False).draft
            assert judged_draft is not None
            judged_draft.save_pretrained(place / "draft")
        os.replace(place / "draft", saved)
        save_as_gguf(pair, settings, saved)
    results.finish(result, render)
    shutil.rmtree(place)
    sys.stdout.write(terminal(render(result)))


def _given_draft(
    settings: Settings, pair: LoadedPair, answers: Answers, place: Path, shared: Processes
) -> tuple[LoadedPair, Training, list[str]]:
    """Train a copy of the pair's draft; return the pair, the facts of the training, and notes for the report."""
    # Here because it takes seconds, and needs accelerate.
    from hf_specdec.bench.aligning.training import train

    assert pair.draft is not None and pair.draft_name is not None
    copy = with_draft(pair, pair.draft_name, settings, pair.draft.device, trim=False).draft
    assert copy is not None
    return pair, train(settings, pair, copy, answers.learned, answers.held_out, place, shared), []


def _made_draft(
    settings: Settings, target: LoadedPair, answers: Answers, place: Path, shared: Processes
) -> tuple[LoadedPair, Training, list[str]]:
    """Choose the layers of a draft and train it; return it untrained, the facts of the training, and notes."""
    from hf_specdec.bench.aligning.training import train

    learned, held_out = answers.learned, answers.held_out
    tokens = proposed_tokens(settings, target, learned)
    fit = partial(train, replace(settings, batch_sizes=(_ROWS,)), learned=learned, held_out=held_out, shared=shared)
    dtype, seconds = draft_dtype(settings, target), 60 * settings.minutes * _TRYING
    trials = Trials(target, tokens, held_out, fit, place / "trials", seconds, dtype)
    layers = settings.layers or trials.best()
    pair = cut(target, layers, tokens)
    notes = [
        f"{covered(tokens, held_out):.1%} of the tokens of held-out answers are among those that the draft proposes: "
        "the most that can be accepted.",
        *trials.notes,
    ]
    seconds = 60 * settings.minutes * (1 - ANSWERING - (0 if settings.layers else _TRYING))
    assert pair.draft is not None
    if answers.general is not None:
        seconds, folder = seconds / 2, place / "general"
        clock = Clock(folder / "seconds", seconds)
        facts = fit(pair=pair, draft=pair.draft, learned=answers.general, folder=folder, clock=clock)
        unrounded = replace(settings, draft_dtype="auto")
        pair = with_draft(pair, str(folder / "draft"), unrounded, pair.draft.device, trim=False)
        notes.append(
            f"Before, it was trained for {facts.seconds:.0f} s on {facts.prompts:,} answers to prompts of the target "
            f"({facts.tokens:,} tokens): {facts.agreement[-1][1]:.1%} agreement on held-out answers."
        )
    facts = fit(pair=pair, draft=pair.draft, folder=place, clock=Clock(place / "seconds", seconds))
    before = cut(target, layers, tokens)
    assert before.draft is not None
    hf_specdec.trim_draft_head(before.draft.to(dtype))
    return before, replace(facts, layers=tuple(layers), vocabulary=len(tokens)), notes


def save_as_gguf(pair: LoadedPair, settings: Settings, saved: Path) -> None:
    """If the target is a GGUF file, write the draft as such to folder `saved`, with the target's tokenizer.

    Nothing is written for families that `gguf_export` does not support.
    """
    if not is_gguf(pair.target_name):
        return
    # Here because it needs gguf, as such targets do.
    from hf_specdec.bench.models.gguf_export import export_refusal, write_gguf

    draft = with_draft(pair, str(saved), settings, pair.target.device, trim=False).draft
    assert draft is not None
    if export_refusal(draft) is None:
        write_gguf(draft, saved / GGUF, "q8_0", gguf_path(pair.target_name))


def workplace(settings: Settings, answers: Path) -> Path:
    """The folder for the checkpoints of a training with these arguments on these answers."""
    told = json.dumps(as_json(settings) | {"output_dir": answers.name}, sort_keys=True)
    digest = hashlib.blake2b(told.encode(), digest_size=6).hexdigest()
    return settings.output_dir / f"{stem(settings)}-{digest}"


def judging(settings: Settings) -> Settings:
    """The settings for judging drafts, under which the result is stored."""
    return replace(settings, batch_sizes=(1,))


def check_arguments(settings: Settings) -> None:
    """Raise `BenchError` for impossible settings, before anything is loaded."""
    makes, by_tokens = settings.task == "draft", settings.loss == "cross_entropy"
    for package, wanted, argument in (
        ("accelerate", True, f"--task: {settings.task!r}"),
        ("peft", settings.lora_rank is not None, f"--lora_rank: {settings.lora_rank}"),
    ):
        if wanted and find_spec(package) is None:
            raise BenchError(f"{argument} needs {package}, which is not installed; pip install 'hf_specdec[align]'")
    if synthetic.is_synthetic(settings.model_name):
        raise BenchError(f"--model_name: {settings.model_name!r} has random weights; give a target that was trained")
    if settings.drafter not in (None, "model"):
        raise BenchError(f"--drafter: {settings.drafter!r} is not a model that can be trained; leave it out")
    if settings.draft_precision is not None:
        raise BenchError(f"--draft_precision: {settings.draft_precision!r} can't be trained; leave it out")
    if makes and settings.precision is not None:
        raise BenchError(f"--precision: {settings.precision!r} weights can't be trained; leave it out")
    if makes and by_tokens:
        raise BenchError("--loss: 'cross_entropy' does not learn from distributions; choose another loss")
    for argument in ("top_k_targets", "on_policy"):
        if by_tokens and (value := getattr(settings, argument)):
            raise BenchError(
                f"--{argument}: {value} asks for the target's distributions, which --loss cross_entropy does not "
                "use; leave it out, or choose another loss"
            )
    if settings.on_policy and settings.top_k_targets:
        raise BenchError(
            f"--top_k_targets: {settings.top_k_targets} stores judgements of the target's answers alone, and "
            f"--on_policy {settings.on_policy:g} judges the draft's too; give one of them"
        )
    if writes_prompts(settings) and settings.held_out is not None:
        raise BenchError(f"--held_out: {settings.held_out:g} is for a data set to learn from; leave it out")


def check_models(settings: Settings, pair: LoadedPair) -> None:
    """Raise `BenchError` if no draft can be made of the target, or the given draft cannot be aligned."""
    if settings.task == "draft":
        check_target(pair)
        if writes_prompts(settings) and pair.encoder_decoder:
            raise BenchError(
                f"--dataset: {pair.target_name!r} is an encoder-decoder model, which writes no prompts of its own; "
                "give some"
            )
        # These raise now what would otherwise be raised after the answers.
        if settings.layers:
            cut_draft(pair.target, settings.layers, [])
        if settings.draft_vocabulary is not None:
            proposed_tokens(settings, pair, {"answer": []})
        return
    assert pair.draft_tokenizer is not None
    if pair.draft_tokenizer.get_vocab() != pair.tokenizer.get_vocab():
        raise BenchError(
            f"--assistant_model: {pair.draft_name!r} has another vocabulary than the target {pair.target_name!r}; "
            "give a draft that shares the target's tokenizer"
        )
    if (settings.top_k_targets or 0) > (most := shared_vocabulary(pair)):
        raise BenchError(f"--top_k_targets: {settings.top_k_targets} exceeds the vocabulary; give at most {most}")


def writes_prompts(settings: Settings) -> bool:
    """Whether the draft learns from prompts that the target writes itself."""
    return settings.task == "draft" and (settings.own_prompts or settings.dataset == OWN)


def destination(settings: Settings, pair: LoadedPair) -> Path:
    """The folder of the trained draft; raises `BenchError` if it exists."""
    name = f"{short_name(settings.model_name)}-draft"
    if settings.task == "align":
        name = f"{short_name(str(pair.draft_name))}-aligned"
    path = settings.output_dir / name
    if path.exists():
        raise BenchError(
            f"--output_dir: {str(path)!r} is there already and is not overwritten; move it away, or give another folder"
        )
    return path


def prompts(settings: Settings) -> tuple[Dialogues, Dialogues]:
    """Dialogues to learn from, and held-out ones; no prompt is in both.

    The embedded data has a split for each. From other data, a share is held out, at most `MOST_HELD_OUT` dialogues.

    Raises:
        BenchError: see `questions.dialogues`, or there are too few prompts.
    """
    if questions.is_embedded(settings.dataset):
        for option in ("split", "held_out"):
            if (value := getattr(settings, option)) is not None:
                raise BenchError(
                    f"--{option}: {value!r} can't be chosen for the embedded data: drafts learn from train and are "
                    "judged on heldout; leave it out"
                )
        kinds = len(questions.embedded_subtasks(settings.dataset))
        judged = replace(settings, split="heldout", limit=MOST_HELD_OUT // kinds)
        return questions.dialogues(replace(settings, split="train")), questions.dialogues(judged)
    split = None if questions.split_of(settings) is None else settings.split or "train"
    found = questions.dialogues(replace(settings, split=split))
    share = _HELD_OUT_SHARE if settings.held_out is None else settings.held_out
    count = min(MOST_HELD_OUT, max(1, round(len(found) * share)))
    held_out = [found[number * len(found) // count] for number in range(count)]
    texts = {dialogue[-1].turns for dialogue in held_out}
    learned = [dialogue for dialogue in found if dialogue[-1].turns not in texts]
    if not learned:
        raise BenchError(f"--dataset: {settings.dataset!r} has too few different prompts to hold one out; give more")
    return learned, held_out


def proposed_tokens(settings: Settings, pair: LoadedPair, learned: Any) -> list[int]:
    """The tokens that the draft may propose: the fewest that make up nearly all of the answers."""
    counts = Counter(chain.from_iterable(learned["answer"]))
    total, found, count = counts.total(), 0, 0
    for _, times in counts.most_common():
        if found >= _COVERED * total:
            break
        found, count = found + times, count + 1
    count = settings.draft_vocabulary or count + 64  # room for those of the chat template
    try:
        return hf_specdec.frequent_tokens(learned["answer"], pair.tokenizer, count)
    except ValueError as error:
        raise BenchError(f"--draft_vocabulary: {count} is not possible ({error})") from error


def covered(tokens: list[int], answers: Any) -> float:
    """The share of the answers' tokens that are in a list."""
    known, written = set(tokens), list(chain.from_iterable(answers["answer"]))
    return sum(token in known for token in written) / len(written)


def draft_dtype(settings: Settings, target: LoadedPair) -> torch.dtype:
    """The dtype in which a draft is judged and saved; it is trained in the target's."""
    return target.target.dtype if settings.draft_dtype == "auto" else getattr(torch, settings.draft_dtype)


def cut(pair: LoadedPair, layers: tuple[int, ...], tokens: list[int]) -> LoadedPair:
    """The target with an untrained draft of these layers."""
    name = f"{short_name(pair.target_name)}, layers {' '.join(map(str, layers))}"
    draft = cut_draft(pair.target, layers, tokens)
    return replace(pair, draft=draft, draft_name=name, draft_tokenizer=pair.tokenizer)


def contenders(settings: Settings, before: LoadedPair, after: LoadedPair) -> list[Contender]:
    """Plain decoding, the draft before and after training; for a draft that was made, also copies with and without."""
    keywords = chosen_keywords(settings, after)
    found = [
        plain(after),
        plain_on_engine(keywords, after),
        ours("speculative", keywords, before, name=BEFORE, title="draft before training"),
        ours("speculative", keywords, after, name=AFTER, title="draft"),
    ]
    if settings.task == "draft":
        copies = keywords | {"num_assistant_tokens": None}
        found.insert(2, ours("speculative", copies | {"drafter": "suffix"}, after, name=SUFFIX))
        found.append(ours("speculative", copies | {"drafter": "auto"}, after, name=AUTO, title="draft and copies"))
    return found


def render(result: Result) -> list[Block]:
    """The report."""
    part = whole(result)
    rounds = method_table({"": part}, columns.ROUNDS, methods=columns.drafted)
    accepted = method_table(
        by_subtask(part), trained_drafts.ACCEPTED, group="Subtask", methods=lambda _: [result.method(AFTER)]
    )
    return [
        heading(part),
        trained_drafts.verdict(part),
        trained_drafts.use(part),
        *section("Speed", columns.SPEED, method_table({"": part}, columns.speed_columns(result))),
        *section("Acceptance", trained_drafts.ACCEPTANCE, accepted),
        Picture("acceptance-by-position", "lookahead.by_position", (part,)),
        *section("Rounds", columns.ROUNDS_LEGEND, rounds),
        *section("Training", trained_drafts.training_table(result), trained_drafts.curve(result)),
        *remarks(part),
    ]
