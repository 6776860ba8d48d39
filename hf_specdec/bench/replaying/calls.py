"""The calls that would have decoded a log's answers, with each drafter and setting."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, product

from tqdm import tqdm
from transformers import PreTrainedModel

from hf_specdec.bench.inputs.logs import Logged
from hf_specdec.bench.models.loading import without_weights
from hf_specdec.bench.records import Call, Method
from hf_specdec.bench.replaying.draft_models import Predicted, PredictedDrafter, predicted
from hf_specdec.bench.replaying.rounds import Known, replayed
from hf_specdec.bench.replaying.times import Kind, RoundTimes
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.rounds import summary
from hf_specdec.bench.running.timed_call import digest, seed_of
from hf_specdec.bench.settings import Settings
from hf_specdec.config import SpeculationConfig
from hf_specdec.drafting.suffix_memory import SuffixMemory
from hf_specdec.rules.round_statistics import Round

REMEMBERING = "remembering"  # the role of methods that copy from earlier answers too
_WARM_UPS = 3  # replays of the first answer from which "auto" learns before calls count


def replayed_calls(
    settings: Settings,
    contenders: Sequence[Contender],
    known: Sequence[tuple[Logged, Known]],
    times: Mapping[Kind, RoundTimes],
) -> list[Call]:
    """Replay the calls of our contenders on known answers."""
    pair = contenders[0].pair
    views: list[Predicted | None] = [None] * len(known)
    if any(one.method.draft for one in contenders):
        bar = tqdm(known, desc="answers read by the draft", unit="answer", file=sys.stderr)
        views = [predicted(pair, one.prompt, one.answer, settings) for _, one in bar]
    calls: list[Call] = []
    # "auto" learns from call to call, so a check replays as many calls as were measured.
    repeats = settings.repeats if settings.sampling or settings.check else 1
    for one in tqdm(contenders[1:], desc="replayed", unit="method", file=sys.stderr):
        # A separate target: what "auto" or a drafter remembers of one must come from these answers alone.
        target = without_weights(pair.target.config)
        target.generation_config = pair.target.generation_config
        memory = SuffixMemory() if one.method.role == REMEMBERING else None
        rounds_take = times[Kind.of(one.method)]
        unsteady = cycle(rounds_take.unsteady)
        work = [*product(range(repeats), zip(known, views, strict=True))]
        warm = work[:1] * (_WARM_UPS if one.method.lookahead == "auto" else 0)
        for position, (repeat, ((logged, text), view)) in enumerate([*warm, *work]):
            if memory is not None and text is known[0][1]:
                memory.clear()  # a warm-up or a repeat begins
            prompt = logged.prompt
            seed = seed_of(settings, prompt, repeat)
            view = view and view.drawn(text.answer, pair.target.config.get_text_config().vocab_size, seed)
            rounds = _rounds(one.method, text, target, view, memory, rounds_take, unsteady)
            seconds = sum(each.seconds for each in rounds) + rounds_take.between * (len(rounds) - 1)
            call = Call(
                method=one.name, prompts=(prompt.index,), repeat=repeat, position=len(calls), seconds=seconds,
                first_seconds=rounds[0].seconds, new_tokens=len(text.answer), outputs=(digest(text.answer),),
                **vars(summary(rounds, times=True)),
            )  # fmt: skip
            calls += [call] if position >= len(warm) else []
    return calls


def _rounds(
    method: Method,
    text: Known,
    target: PreTrainedModel,
    view: Predicted | None,
    memory: SuffixMemory | None,
    times: RoundTimes,
    unsteady: Iterator[float],
) -> list[Round]:
    drafter, tokens, prepared = method.keywords["drafter"], method.lookahead, method.engine == "compiled"
    config = SpeculationConfig(drafter=drafter, num_assistant_tokens=tokens, suffix_memory=memory)  # type: ignore[arg-type]
    config = config.resolve(target.config.model_type).within(text.max_new_tokens)
    if view is None or not config.drafts_by_model:
        return replayed(config, text, target, times, prepared=prepared, unsteady=unsteady)
    by_model = partial(
        PredictedDrafter, start=len(text.prompt), found=view, eos_tokens=frozenset(text.eos_tokens),
        compiled=prepared,
    )  # fmt: skip
    overlap = view.overlap if config.drafter == "model" else None
    return replayed(
        config, text, target, times, by_model=by_model, overlap=overlap, prepared=prepared, unsteady=unsteady
    )
