"""The ways of decoding that are compared: how each is set up, asked for, and what its rounds were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_specdec
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import Settings

# As Spec-Bench runs it; a look-up costs nothing, so that it pays to draft more than a model would.
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class RoundRecord:
    """One round at batch size 1, the same for every method that drafts.

    `overlap` is the sum over the positions reached of the overlap of both distributions (`hf_specdec.Round`);
    it and the seconds are None where the method doesn't tell.
    """

    drafted: int
    accepted: int
    new_tokens: int
    overlap: float | None
    draft_steps: int
    width: int
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    `options` are added to generate()'s arguments. `surroundings(pair)` is entered around the call, outside
    the clock; what it yields is handed to `read_rounds(output, puts, log)`, which returns None for a method
    that doesn't draft. `facts` say in data what the title says in words, for reports over many methods.
    """

    name: str
    title: str
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    surroundings: Callable[[LoadedPair], AbstractContextManager[Any]] = lambda pair: nullcontext()
    read_rounds: Callable[[Any, Sequence[int], Any], list[RoundRecord] | None] = lambda output, puts, log: None


def methods_for(settings: Settings, pair: LoadedPair) -> list[Method]:
    """Plain decoding, and with assistance the chosen strategy and, unless refused, transformers' own loop."""
    methods = [plain()]
    if settings.assisted_generation:
        methods.append(strategy(settings, pair))
        if assisted_refusal(settings, pair) is None:
            methods.append(transformers_assisted(settings, pair))
    return methods


def assisted_refusal(settings: Settings, pair: LoadedPair) -> str | None:
    """Why transformers' own assisted generation can't be a baseline here, in a sentence; None where it can."""
    if settings.sampling and pair.draft is not None and not _same_vocabulary(pair):
        return (
            "transformers' assisted generation is left out: the vocabularies of target and draft differ in size, and "
            "to sample it would cut the draft's head for good."
        )
    return None


def plain() -> Method:
    """generate() without a draft."""
    return Method("plain", "plain decoding")


def strategy(settings: Settings, pair: LoadedPair) -> Method:
    """The chosen strategy."""
    return strategy_named(settings.generation_strategy, settings, pair)


def strategy_named(name: str, settings: Settings, pair: LoadedPair) -> Method:
    """Our own decoding, the way a user asks for it."""
    options: dict[str, Any] = {
        "assistant_model": pair.draft,
        "generation_strategy": name,
        "num_assistant_tokens": lookahead(settings, pair),
    }
    title = "speculative decoding"
    if name == "bild":
        options["fallback_threshold"] = settings.fallback_threshold
        options["rollback_threshold"] = settings.rollback_threshold
        title = f"BiLD (fallback {settings.fallback_threshold:g}, rollback {settings.rollback_threshold:g})"
    return Method(
        name,
        title,
        options,
        surroundings=lambda loaded: hf_specdec.enable(loaded.target),
        read_rounds=lambda output, puts, log: [_our_round(item) for item in output.speculation.rounds],
    )


def transformers_assisted(settings: Settings, pair: LoadedPair) -> Method:
    """transformers' own assisted generation with the same lookahead, a constant schedule and no early stop.

    Where vocabularies differ in size, transformers wants both tokenizers and drafts through text.
    """
    options: dict[str, Any] = {"assistant_model": pair.draft}
    title = "transformers' assisted generation"
    if not _same_vocabulary(pair):
        options |= {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.draft_tokenizer}
        title += " (through both tokenizers)"
    tokens = lookahead(settings, pair)
    return Method(
        "assisted",
        title,
        options,
        surroundings=lambda loaded: _drafting_as(loaded.draft, tokens),
        read_rounds=lambda output, puts, log: _assisted_rounds(output, puts, log, greedy=not settings.sampling),
    )


def assisted_as(
    settings: Settings, pair: LoadedPair, title: str, tokens: int, schedule: str, confidence: float
) -> Method:
    """transformers' own assisted generation with a schedule of its own; each call starts with `tokens` anew."""
    return replace(
        transformers_assisted(settings, pair),
        name=f"assisted {title}",
        title=f"transformers' assisted generation, {title}",
        surroundings=lambda loaded: _drafting_as(loaded.draft, tokens, schedule, confidence),
    )


def prompt_lookup(settings: Settings) -> Method:
    """transformers' own prompt lookup: drafts are what followed the same words earlier in the text."""
    return Method(
        "prompt_lookup",
        f"transformers' prompt lookup ({LOOKUP_TOKENS} tokens)",
        {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        surroundings=lambda loaded: _watched_lookups(),
        # Looking up takes no forward pass.
        read_rounds=lambda output, puts, log: [
            replace(item, draft_steps=0) for item in _assisted_rounds(output, puts, log, greedy=not settings.sampling)
        ],
    )


def lookahead(settings: Settings, pair: LoadedPair) -> int:
    """Draft tokens per round (gamma): as asked for, otherwise the default of the target's family."""
    config = hf_specdec.SpeculationConfig(num_assistant_tokens=settings.num_assistant_tokens)
    return cast(int, config.resolve(pair.target.config.model_type).num_assistant_tokens)


def _same_vocabulary(pair: LoadedPair) -> bool:
    return len({model.config.get_text_config().vocab_size for model in pair.models}) == 1


def _our_round(item: hf_specdec.Round) -> RoundRecord:
    return RoundRecord(
        drafted=item.drafted[0],
        accepted=item.accepted[0],
        new_tokens=item.new_tokens[0],
        overlap=item.overlap[0],
        draft_steps=item.draft_steps,
        width=item.width,
        draft_seconds=item.draft_seconds,
        verify_seconds=item.verify_seconds,
        seconds=item.seconds,
    )


@contextmanager
def _drafting_as(
    draft: PreTrainedModel, tokens: int, schedule: str = "constant", confidence: float = 0.0
) -> Iterator[list[Tensor]]:
    """Sets the draft's generation_config for transformers' loop; yields a list of what it drafts, `[length]` a round.

    transformers reads lookahead, schedule and confidence threshold from there only. It calls the draft's
    generate() once a round, so looking there costs a microsecond a round. Both are put back.
    """
    saved, generate = draft.generation_config, draft.generate
    drafted: list[Tensor] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        start = kwargs["decoder_input_ids"] if "decoder_input_ids" in kwargs else kwargs["input_ids"]
        drafted.append(output.sequences[0, start.shape[1] :])
        return output

    config = copy.deepcopy(saved)
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = schedule
    config.assistant_confidence_threshold = confidence
    draft.generation_config = config
    draft.generate = watched
    try:
        yield drafted
    finally:
        del draft.generate
        draft.generation_config = saved


@contextmanager
def _watched_lookups() -> Iterator[list[Tensor]]:
    """Yields a list of what transformers' prompt lookup finds, `[length]` a round."""
    get_candidates = PromptLookupCandidateGenerator.get_candidates
    found: list[Tensor] = []

    def watched(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        candidates = get_candidates(self, input_ids, **kwargs)
        found.append(candidates[0][0, input_ids.shape[1] :])
        return candidates

    PromptLookupCandidateGenerator.get_candidates = watched
    try:
        yield found
    finally:
        PromptLookupCandidateGenerator.get_candidates = get_candidates


def _assisted_rounds(output: Any, puts: Sequence[int], drafted: Sequence[Tensor], greedy: bool) -> list[RoundRecord]:
    """transformers streams one round a put; the last token of each is the target's own, the others accepted.

    A last token that the draft had at its place was accepted, too: there the text ended, as at an accepted EOS. A
    token of the target's own is never the one that it refused. With a single token left transformers does not ask
    the draft, so there may be fewer drafts. In greedy decoding the overlap at a position is whether the target
    agrees; in sampling transformers doesn't tell.
    """
    total = sum(puts)
    tokens = output.sequences[0, -total:].tolist() if total else []
    rounds, end = [], 0
    for place, new in enumerate(puts):
        draft = drafted[place].tolist() if place < len(drafted) else []
        end += new
        accepted = new if draft[new - 1 : new] == [tokens[end - 1]] else new - 1
        rounds.append(
            RoundRecord(
                drafted=len(draft),
                accepted=accepted,
                new_tokens=new,
                overlap=float(accepted) if greedy else None,
                draft_steps=len(draft),
                width=len(draft) + 1,
            )
        )
    return rounds


def as_dicts(rounds: Sequence[RoundRecord] | None) -> list[dict[str, Any]] | None:
    """JSON-serialisable."""
    return None if rounds is None else [asdict(item) for item in rounds]
