"""The calls that a log's answers would have taken, with each drafter and setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

from tqdm import tqdm
from transformers import PreTrainedModel

from hf_specdec.bench.figures import passes
from hf_specdec.bench.inputs.logs import Logged
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair, without_weights
from hf_specdec.bench.records import Call, Method, Pass, Result
from hf_specdec.bench.replaying.draft_models import Predicted, PredictedDrafter, predicted
from hf_specdec.bench.replaying.rounds import Known, replayed
from hf_specdec.bench.running.methods import Contender
from hf_specdec.bench.running.rounds import summary
from hf_specdec.bench.running.timed_call import digest, seed_of
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.config import SpeculationConfig
from hf_specdec.rules.round_statistics import Round

_WARM_UPS = 3  # times that "auto" sees the first answer before it counts


def given_passes(settings: Settings, pair: LoadedPair, engine: str, prompt: Prompt) -> list[Pass]:
    """The times of `pass_times`, as if measured on an engine; raises `BenchError` where they are none."""
    target, step = settings.pass_times.get("target"), settings.pass_times.get("draft")
    try:
        times = [("target", int(tokens), float(value)) for tokens, value in (target or {}).items()]
        times += [] if step is None else [("draft", 1, float(step))]
    except (TypeError, ValueError, AttributeError):
        times = []
    if not any(one[:2] == ("target", 1) for one in times) or (step is None and pair.draft is not None):
        raise BenchError(
            "--pass_times: give milliseconds of the target's passes by tokens, of one token among them, and of a draft "
            """step where there is a draft: '{"target": {"1": 20, "5": 24}, "draft": 4}'"""
        )
    place = engine, pair.draft_name, (prompt.index,), 0, len(prompt.token_ids)
    return [Pass(*place, role, tokens, milliseconds / 1000) for role, tokens, milliseconds in times]


def replayed_calls(
    settings: Settings, contenders: Sequence[Contender], known: Sequence[tuple[Logged, Known]], result: Result
) -> list[Call]:
    """What the calls of our contenders would have been, their times made of bare passes."""
    pair = contenders[0].pair
    views: list[Predicted | None] = [None] * len(known)
    if any(one.method.draft for one in contenders):
        bar = tqdm(known, desc="answers read by the draft", unit="answer", file=sys.stderr)
        views = [predicted(pair, one.prompt, one.answer, settings) for _, one in bar]
    calls: list[Call] = []
    repeats = settings.repeats if settings.sampling else 1
    for one in tqdm(contenders[1:], desc="replayed", unit="method", file=sys.stderr):
        # Of its own: what "auto" or a drafter remembers of a target must come from these answers alone.
        target = without_weights(pair.target.config)
        target.generation_config = pair.target.generation_config
        costs = passes.costs(result, one.method.engine)
        work = [*product(range(repeats), zip(known, views, strict=True))]
        warm = work[:1] * (_WARM_UPS if one.method.lookahead == "auto" else 0)
        for position, (repeat, ((logged, text), view)) in enumerate([*warm, *work]):
            prompt = logged.prompt
            seed = seed_of(settings, prompt, repeat)
            view = view and view.drawn(text.answer, pair.target.config.get_text_config().vocab_size, seed)
            here = passes.nearest(costs, len(prompt.token_ids))
            rounds = _rounds(one.method, text, target, here, view)
            seconds = sum(each.seconds for each in rounds)
            call = Call(
                method=one.name, prompts=(prompt.index,), repeat=repeat, position=len(calls), seconds=seconds,
                first_seconds=rounds[0].seconds, new_tokens=len(text.answer), outputs=(digest(text.answer),),
                **vars(summary(rounds, times=True)),
            )  # fmt: skip
            calls += [call] if position >= len(warm) else []
    return calls


def _rounds(
    method: Method, text: Known, target: PreTrainedModel, costs: passes.Costs, view: Predicted | None
) -> list[Round]:
    keywords = method.keywords
    config = SpeculationConfig(drafter=keywords["drafter"], num_assistant_tokens=method.lookahead)  # type: ignore[arg-type]
    config = config.resolve(target.config.model_type).within(text.max_new_tokens)
    if view is None or not config.drafts_by_model:
        return replayed(config, text, target, costs)
    whole_steps = method.engine == "compiled" and config.drafter == "model"
    by_model = partial(
        PredictedDrafter, start=len(text.prompt), found=view, eos_tokens=frozenset(text.eos_tokens),
        compiled=whole_steps,
    )  # fmt: skip
    overlap = view.overlap if config.drafter == "model" else None
    return replayed(config, text, target, costs, by_model=by_model, overlap=overlap)
