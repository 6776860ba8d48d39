"""Makes a draft from some of a target's layers, trains it on the target's answers, and judges it."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.aligning.answers import answers_folder, target_answers
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.own_prompts import own_groups, own_questions
from hf_specdec.bench.aligning.shape import check_target, cut_draft
from hf_specdec.bench.aligning.shapes import Trials
from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import Part, whole
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.questions import OWN
from hf_specdec.bench.journal import Journal
from hf_specdec.bench.models.loading import LoadedPair, gguf_path, load_pair, with_draft
from hf_specdec.bench.models.names import is_gguf, short_name, stem
from hf_specdec.bench.records import Result
from hf_specdec.bench.reports import columns
from hf_specdec.bench.reports.columns import method_table
from hf_specdec.bench.reports.document import Block, Picture, section
from hf_specdec.bench.reports.heading import heading, remarks, terminal
from hf_specdec.bench.reports.markdown import table
from hf_specdec.bench.running.measuring import batches, measured_questions
from hf_specdec.bench.running.methods import Contender, chosen_keywords, ours, plain, plain_on_engine
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import align
from hf_specdec.bench.tasks.align import AFTER, BEFORE, MOST_HELD_OUT, Dialogues, judging
from hf_specdec.models.processor import multiplies_bfloat16

SUFFIX, HYBRID = "suffix", "hybrid"  # the names of more methods
GGUF = "draft.gguf"  # in the draft's folder, for targets from GGUF files
_ANSWERING, _TRYING = 0.45, 0.1  # of the time; the rest trains
_ROWS = 8  # texts of a training step
_COVERED = 0.98  # of the answers' tokens are among those that the draft may propose
_HELD_OUT = 10  # one of this many answers to the target's own prompts is held out


def run(settings: Settings, shared: Processes) -> None:
    """Answer, try shapes, train and judge; the draft is saved as `<target>-draft`. The report says whether to use it.

    An interrupted run continues where it stopped. Raises `BenchError` for errors that the user can fix.
    """
    check_arguments(settings)
    judged = judging(settings)
    Journal(judged, stem(judged), shared.count)
    saved = destination(settings)
    own = writes_prompts(settings)
    given, asked = ([], []) if own else align.prompts(settings)
    target = load_pair(settings)
    check_target(target)
    if own and target.encoder_decoder:
        raise BenchError(
            f"--dataset: {target.target_name!r} is an encoder-decoder model, which writes no prompts of its own; give "
            "some"
        )
    folder, learned, held_out = answered(settings, target, given, asked, shared)
    held_out = held_out.select(range(min(MOST_HELD_OUT, len(held_out))))
    if own:
        asked = own_questions(folder / "prompts.jsonl", held_out["index"])
        asked = asked if settings.dataset == OWN else questions.dialogues(settings)

    # Here because it takes seconds, and needs accelerate.
    from hf_specdec.bench.aligning.training import train

    place = align.workplace(settings, folder)
    tokens = proposed_tokens(settings, target, learned)
    fit = partial(train, replace(settings, batch_sizes=(_ROWS,)), learned=learned, held_out=held_out, shared=shared)
    trials = Trials(target, tokens, held_out, fit, place / "trials", 60 * settings.minutes * _TRYING)
    layers = settings.layers or trials.best()
    pair = cut(target, layers, tokens)
    clock = Clock(place / "seconds", 60 * settings.minutes * (1 - _ANSWERING - (0 if settings.layers else _TRYING)))
    assert pair.draft is not None
    facts = fit(pair=pair, draft=pair.draft, folder=place, clock=clock)

    before = cut(target, layers, tokens)
    hf_specdec.trim_draft_head(before.draft)
    after = replace(with_draft(target, str(place / "draft"), settings, target.target.device), draft_name=str(saved))
    result = measured_questions(judged, contenders(judged, before, after), asked, shared)
    if result is None:
        return
    result.training = replace(
        facts,
        prompts=len(learned),
        tokens=sum(map(len, learned["answer"])),
        rows=_ROWS,
        answers=str(folder),
        saved=str(saved),
        layers=tuple(layers),
        vocabulary=len(tokens),
    )
    answering = Clock(folder / "seconds", 1).before
    result.notes += [
        f"The target answered for {answering / 60:.0f} minutes, all starts together.",
        f"{covered(tokens, held_out):.1%} of the tokens of held-out answers are among those that the draft proposes: "
        "the most that can be accepted.",
        *trials.notes,
    ]
    os.replace(place / "draft", saved)
    save_as_gguf(target, settings, saved)
    results.finish(result, render)
    shutil.rmtree(place)
    sys.stdout.write(terminal(render(result)))


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


def check_arguments(settings: Settings) -> None:
    """Raise `BenchError` for impossible settings, before anything is loaded."""
    align.check_arguments(settings)
    if settings.loss == "cross_entropy":
        raise BenchError("--loss: 'cross_entropy' does not learn from distributions; choose another loss")
    if settings.precision is not None:
        raise BenchError(f"--precision: {settings.precision!r} weights can't be trained; leave it out")
    if writes_prompts(settings) and settings.held_out is not None:
        raise BenchError(f"--held_out: {settings.held_out:g} is for a data set to learn from; leave it out")


def writes_prompts(settings: Settings) -> bool:
    """Whether the draft learns from prompts that the target writes itself."""
    return settings.own_prompts or settings.dataset == OWN


def destination(settings: Settings) -> Path:
    """The folder of the draft; raises `BenchError` if it exists."""
    path = settings.output_dir / f"{short_name(settings.model_name)}-draft"
    if path.exists():
        raise BenchError(
            f"--output_dir: {str(path)!r} is there already and is not overwritten; move it away, or give another folder"
        )
    return path


def answered(
    settings: Settings, pair: LoadedPair, given: Dialogues, asked: Dialogues, shared: Processes
) -> tuple[Path, Any, Any]:
    """The folder of the target's answers, those to learn from, as many as time allows, and the held-out ones.

    Raises:
        BenchError: there was no time for any.
    """
    if not given:
        # The target's own prompts do not depend on the data that judges.
        settings = replace(
            settings, dataset=OWN, dataset_path=None, split=None, prompt_column=None, prompt_template="{prompt}",
            limit=None,
        )  # fmt: skip
    folder = answers_folder(settings, pair)
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(folder / "seconds", 60 * settings.minutes * _ANSWERING)
    size, pair = settings.batch_size, for_many_rows(pair)
    answer = partial(target_answers, settings=settings, pair=pair, shared=shared, contender=plain(pair))
    groups = batches(given, size) if given else own_groups(folder / "prompts.jsonl", settings, pair)
    held_out = answer(folder / "held-out", groups=batches(asked, size)) if given else None
    learned = answer(folder / "learned", groups=clock.until_over(groups))
    if held_out is None and learned is not None:
        indexes = list(enumerate(learned["index"]))
        places = [[place for place, index in indexes if (index % _HELD_OUT == 0) == apart] for apart in (False, True)]
        learned, held_out = (learned.select(some) if some else None for some in places)
    if learned is None or held_out is None:
        raise BenchError(f"--minutes: {settings.minutes:g} are too few for a single batch of answers; give more")
    return folder, learned, held_out


def for_many_rows(pair: LoadedPair) -> LoadedPair:
    """The target in bfloat16 if the processor multiplies it: in large batches, matrix products take most of the time.

    Texts may differ from those in float32 where two tokens are almost equally likely, but are still the target's own.
    """
    target = pair.target
    if target.device.type != "cpu" or target.dtype != torch.float32 or not multiplies_bfloat16():
        return pair
    return replace(pair, target=deepcopy(target).to(torch.bfloat16))


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


def cut(pair: LoadedPair, layers: tuple[int, ...], tokens: list[int]) -> LoadedPair:
    """The target with an untrained draft of these layers."""
    name = f"{short_name(pair.target_name)}, layers {' '.join(map(str, layers))}"
    draft = cut_draft(pair.target, layers, tokens)
    return replace(pair, draft=draft, draft_name=name, draft_tokenizer=pair.tokenizer)


def contenders(settings: Settings, before: LoadedPair, after: LoadedPair) -> list[Contender]:
    """Plain decoding, copies, the draft before and after training, and the trained draft with copies."""
    keywords = chosen_keywords(settings, after)
    copies = keywords | {"num_assistant_tokens": None}
    return [
        plain(after),
        plain_on_engine(keywords, after),
        ours("speculative", copies | {"drafter": "suffix"}, after, name=SUFFIX),
        ours("speculative", keywords, before, name=BEFORE, title="draft before training"),
        ours("speculative", keywords, after, name=AFTER, title="draft"),
        ours("speculative", copies | {"drafter": "hybrid"}, after, name=HYBRID, title="draft and copies"),
    ]


def render(result: Result) -> list[Block]:
    """The report."""
    part = whole(result)
    rounds = method_table({"": part}, columns.ROUNDS, methods=columns.drafted)
    return [
        heading(part),
        align.advice(part, [AFTER, HYBRID], SUFFIX),
        use(part),
        *section("Speed", columns.SPEED, method_table({"": part}, columns.speed_columns(result))),
        *section("Rounds", columns.ROUNDS_LEGEND, rounds),
        Picture("acceptance-by-position", "lookahead.by_position", (part,)),
        *section("Training", align.training_table(result), curve(result)),
        *remarks(part),
    ]


def use(part: Part) -> str:
    """Code that uses the draft in the faster way."""
    facts = part.result.training
    assert facts is not None
    best = speed.fastest(part, [part.result.method(name) for name in (AFTER, HYBRID)])
    copies = "" if best is None or best.name == AFTER else ', drafter="hybrid"'
    kind = part.result.models["target"].kind if part.result.encoder_decoder else "AutoModelForCausalLM"
    return f"""```python
draft = {kind}.from_pretrained("{facts.saved}")
hf_specdec.trim_draft_head(draft)  # proposes the {facts.vocabulary:,} tokens that the target writes
model.generate(**inputs, assistant_model=draft, generation_strategy="speculative"{copies}, compile=True)
```"""


def curve(result: Result) -> str:
    """A table of held-out loss and agreement during training."""
    assert result.training is not None
    facts = result.training
    per_step = facts.tokens_read / max(1, facts.steps - facts.resumed_at)
    agreed = dict(facts.agreement)
    return table(
        [
            {
                "Step": str(step),
                "Tokens read": f"{step * per_step:,.0f}",
                "Held-out loss": f"{loss:.3f}",
                "Same most likely token as the target": f"{agreed[step]:.1%}" if step in agreed else "–",
            }
            for step, loss in facts.held_out_curve
        ]
    )
