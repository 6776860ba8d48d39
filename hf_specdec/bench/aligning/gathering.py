"""Gathers the target's answers that a draft learns from and is judged by, within a given time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_specdec.bench.aligning.answers import answers_folder, target_answers
from hf_specdec.bench.aligning.clock import Clock
from hf_specdec.bench.aligning.drawing import SAMPLED
from hf_specdec.bench.aligning.own_prompts import own_groups, writes
from hf_specdec.bench.inputs.questions import OWN, Question
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.measuring import batches
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.models.processor import multiplies_bfloat16

Dialogues = Sequence[Sequence[Question]]

MOST_HELD_OUT = 64  # dialogues
# Of drafts that are made:
ANSWERING = 0.6  # of the time
_HELD_OUT = 10  # one of this many answers to the target's own prompts is held out
_SAMPLES = 16  # answers to one prompt that are sampled together


class Answers(NamedTuple):
    """The target's answers: their folder, those to learn from, held-out ones, and general ones to learn from before."""

    folder: Path
    learned: Any
    held_out: Any
    general: Any = None


def answered(settings: Settings, pair: LoadedPair, given: Dialogues, asked: Dialogues, shared: Processes) -> Answers:
    """The target's answers to prompts to learn from, and to held-out ones.

    A draft that is made learns from as many as time allows. Without `given` prompts, the target writes them itself. If
    there are few, half of the time is for answers to such prompts, which are shorter, and the rest for samples.

    Raises:
        BenchError: there was no time for any.
    """
    if not given:
        # The target's own prompts do not depend on the data that judges.
        settings = replace(
            settings, dataset=OWN, dataset_path=None, split=None, prompt_column=None, prompt_template="{prompt}",
            limit=None,
        )  # fmt: skip
    folder, size = answers_folder(settings, pair), settings.batch_size
    if settings.task == "align":
        answer = partial(target_answers, settings=settings, pair=pair, shared=shared)
        learned = answer(folder / "learned", groups=batches(given, size))
        return Answers(folder, learned, answer(folder / "held-out", groups=batches(asked, size)))
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(folder / "seconds", 60 * settings.minutes * ANSWERING)
    pair = for_many_rows(pair)
    answer = partial(target_answers, settings=settings, pair=pair, shared=shared, contender=plain(pair))
    groups = batches(given, size) if given else own_groups(folder / "prompts.jsonl", settings, pair)
    held_out = answer(folder / "held-out", groups=batches(asked, size)) if given else None
    learned, general = answer(folder / "learned", groups=clock.until_over(groups)), None
    if given and learned is not None and not pair.encoder_decoder:
        if writes(pair):
            own = folder / "general"
            first = Clock(own / "seconds", clock.limit / 2)
            groups = own_groups(own / "prompts.jsonl", settings, pair)
            general = answer(own / "learned", groups=clock.until_over(first.until_over(groups)))
        learned = and_again(learned, answer, folder, settings, given, clock)
    if held_out is None and learned is not None:
        indexes = list(enumerate(learned["index"]))
        places = [[place for place, index in indexes if (index % _HELD_OUT == 0) == apart] for apart in (False, True)]
        learned, held_out = (learned.select(some) if some else None for some in places)
    if learned is None or held_out is None:
        raise BenchError(f"--minutes: {settings.minutes:g} are too few for a single batch of answers; give more")
    return Answers(folder, learned, held_out.select(range(min(MOST_HELD_OUT, len(held_out)))), general)


def for_many_rows(pair: LoadedPair) -> LoadedPair:
    """The target in bfloat16 if the processor multiplies it: in large batches, matrix products take most of the time.

    Texts may differ from those in float32 where two tokens are almost equally likely, but are still the target's own.
    """
    target = pair.target
    if target.device.type != "cpu" or target.dtype != torch.float32 or not multiplies_bfloat16():
        return pair
    return replace(pair, target=deepcopy(target).to(torch.bfloat16))


def and_again(
    learned: Any, answer: Callable[..., Any], folder: Path, settings: Settings, dialogues: Dialogues,
    clock: Clock,
) -> Any:  # fmt: skip
    """Answers, and sampled ones to the same prompts while there is time: one to each may be little to learn from.

    A prompt is read once for several samples. Prompts of similar length share a batch, so that little is padding.

    Args:
        answer: `target_answers`, but for folder, settings and groups.
    """
    import datasets

    samples = min(_SAMPLES, settings.batch_size)
    by_length = sorted(dialogues, key=lambda dialogue: len("".join(dialogue[-1].turns)))
    groups = [
        [[question for question in turn for _ in range(samples)] for turn in group]
        for group in batches(by_length, settings.batch_size // samples)
    ]
    drawn = settings if settings.sampling else replace(settings, **SAMPLED)
    parts = [learned]
    for number in count(1):
        place, again = folder / f"again-{number}", replace(drawn, seed=settings.seed + number)
        if clock.over and not place.exists():  # an earlier start may have left it
            break
        found = answer(place, settings=again, groups=clock.until_over(groups))
        parts += [] if found is None else [found]
    return datasets.concatenate_datasets(parts)
