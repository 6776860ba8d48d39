"""Fine-tunes a draft on its target's answers, and judges it on held-out prompts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hf_specdec.bench import results
from hf_specdec.bench.aligning.answers import answers_folder, target_answers
from hf_specdec.bench.aligning.batches import shared_vocabulary
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, acceptance_rate, tokens_per_round, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.questions import Question
from hf_specdec.bench.journal import Journal
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import LoadedPair, load_pair, with_draft
from hf_specdec.bench.models.names import stem
from hf_specdec.bench.records import Result, as_json
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import number, percent, points, ratio, table
from hf_specdec.bench.running.measuring import batches, measured_questions
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.subtasks import by_subtask

Dialogues = list[list[Question]]

BEFORE, AFTER = "before", "after"  # the names of the methods
MOST_HELD_OUT = 64  # dialogues
LEAST_GAIN = 1.05  # over plain decoding on the same engine, below which a draft is not recommended
_HELD_OUT_SHARE = 0.1  # of the dialogues, if a data set has no split for it


_ACCEPTANCE = (
    "n: different examples. Accepted / drafted tokens on held-out prompts, before and after. Gain: the difference in "
    "points with its 95% interval, by a paired bootstrap over questions, from six on."
)


def run(settings: Settings, shared: Processes) -> None:
    """Answer, train and judge; a draft that is accepted more often than before is saved as `<name>-aligned`.

    An interrupted run continues where it stopped. Raises `BenchError` for errors that the user can fix.
    """
    check_arguments(settings)
    learned, held_out = prompts(settings)
    judged = judging(settings)
    # Raises now what would otherwise be raised after the training.
    Journal(judged, stem(judged), shared.count)
    pair = load_pair(settings)
    saved = destination(settings, pair)
    check_pair(settings, pair)

    # Here because it takes seconds, and needs accelerate.
    from hf_specdec.bench.aligning.training import train

    folder = answers_folder(settings, pair)
    answers = {
        name: target_answers(folder / name, settings, pair, batches(dialogues, settings.batch_size), shared)
        for name, dialogues in (("learned", learned), ("held-out", held_out))
    }
    assert pair.draft is not None and pair.draft_name is not None
    place = workplace(settings, folder)
    copy = with_draft(pair, pair.draft_name, settings, pair.draft.device, trim=False).draft
    assert copy is not None
    facts = train(settings, pair, copy, answers["learned"], answers["held-out"], place, shared)

    aligned = replace(with_draft(pair, str(place / "draft"), settings, pair.draft.device), draft_name=str(saved))
    result = measured_questions(judged, contenders(judged, pair, aligned), held_out, shared)
    if result is None:
        return
    gain = speed.acceptance_gain(whole(result), AFTER, BEFORE)
    better = gain is not None and gain.value > 0
    result.training = replace(
        facts,
        prompts=len(answers["learned"]),
        tokens=sum(map(len, answers["learned"]["answer"])),
        rows=settings.batch_size * shared.count,
        answers=str(folder),
        saved=str(saved) if better else None,
    )
    if better:
        os.replace(place / "draft", saved)
    results.finish(result, render)
    shutil.rmtree(place)
    sys.stdout.write(terminal(render(result)))


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
    """Raise `BenchError` if the models cannot be aligned, or not with these arguments."""
    assert pair.draft_tokenizer is not None
    if pair.draft_tokenizer.get_vocab() != pair.tokenizer.get_vocab():
        raise BenchError(
            f"--assistant_model: {pair.draft_name!r} has another vocabulary than the target {pair.target_name!r}; "
            "give a draft that shares the target's tokenizer"
        )
    if (settings.top_k_targets or 0) > (most := shared_vocabulary(pair)):
        raise BenchError(f"--top_k_targets: {settings.top_k_targets} exceeds the vocabulary; give at most {most}")


def destination(settings: Settings, pair: LoadedPair) -> Path:
    """The folder of the aligned draft; raises `BenchError` if it exists."""
    path = settings.output_dir / f"{Path(str(pair.draft_name)).name}-aligned"
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


def contenders(settings: Settings, pair: LoadedPair, aligned: LoadedPair) -> list[Contender]:
    """Plain decoding, and speculative decoding with the draft before and after training."""
    found = [plain(pair), plain_on_engine(chosen_keywords(settings, pair), pair)]
    for name, one, words in ((BEFORE, pair, "draft as it was"), (AFTER, aligned, "aligned draft")):
        method = ours("speculative", chosen_keywords(settings, one), one, name=name)
        found.append(method.told(title=f"{method.method.title}, {words}"))
    return found


def render(result: Result) -> list[Block]:
    """The report."""
    part = whole(result)
    rounds = method_table({"": part}, columns.ROUNDS, methods=columns.drafted)
    accepted = method_table(by_subtask(part), _ACCEPTED, group="Subtask", methods=lambda _: [result.method(AFTER)])
    return [
        heading(part),
        verdict(part),
        *section("Acceptance", _ACCEPTANCE, accepted),
        Picture("acceptance-by-position", "lookahead.by_position", (part,)),
        *section("Speed", columns.SPEED, method_table({"": part}, columns.speed_columns(result))),
        *section("Rounds", columns.ROUNDS_LEGEND, rounds),
        *section("Training", training_table(result)),
        *remarks(part),
    ]


def verdict(part: Part) -> str:
    """How acceptance and speed changed, and whether the draft was saved."""
    before, after = (percent(acceptance_rate(part.of(name))) for name in (BEFORE, AFTER))
    gain = points(speed.acceptance_gain(part, AFTER, BEFORE))
    change = f"from {before} to {after} on held-out prompts: {gain} points"
    decoding = advice(part, [AFTER])
    training = part.result.training
    if training is None or training.saved is None:
        return (
            f"**The draft did not get better**: acceptance went {change}. It was not saved. {decoding} "
            "Try more prompts, more steps or another learning rate."
        )
    return f"{decoding} Acceptance went {change}. The aligned draft is in `{training.saved}`."


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


_ACCEPTED: columns.Columns = {
    **columns.N,
    "Before": lambda part, _: percent(acceptance_rate(part.of(BEFORE))),
    "After": lambda part, _: percent(acceptance_rate(part.of(AFTER))),
    "Gain (points)": lambda part, _: points(speed.acceptance_gain(part, AFTER, BEFORE)),
    "Tokens/Round before": lambda part, _: number(tokens_per_round(part.of(BEFORE)), 2),
    "Tokens/Round after": lambda part, _: number(tokens_per_round(part.of(AFTER)), 2),
}


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
