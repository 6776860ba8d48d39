"""transformers' own speculative methods, at each of their settings, and how to observe their rounds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers.generation import candidate_generator

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Method, Rounds
from hf_specdec.bench.running.methods import Contender, ReadRounds, fixed_lookahead
from hf_specdec.bench.running.rounds import streamed_rounds
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.compat.transformers_private import is_stateful
from hf_specdec.config import OWN_DRAFTERS
from hf_specdec.models.eagle_draft import Eagle3Draft
from hf_specdec.models.mtp_runner import mtp_layers
from hf_specdec.models.traits import drafts_blocks

# As Spec-Bench runs it; look-ups are nearly free, so longer drafts pay than with a model.
LOOKUP_TOKENS = 10
CONSTANT_LENGTHS = (2, 4, 6, 8)
# Thresholds on the probability of the draft's most likely token.
CONFIDENCES = (0.2, 0.4, 0.6)
_GROWN = 12  # a typical length that a heuristic schedule grows to, in tokens
ENSEMBLE_WEIGHT = 0.5  # the target's share in the mixture by which drafts are judged


@dataclass(frozen=True)
class Schedule:
    """How transformers' assisted generation chooses a draft's length.

    Args:
        tokens: the length at the start of each call.
        kind: `"constant"` or `"heuristic"`.
        confidence: drafts end after a token with a lower probability; 0 disables this.
    """

    tokens: int
    kind: str = "constant"
    confidence: float = 0.0

    @property
    def words(self) -> str:
        """A description for titles and names."""
        if self.confidence:
            return f"confidence {self.confidence:g}"
        return f"{self.kind} {self.tokens}" if self.kind == "constant" else f"{self.kind} from {self.tokens}"


DEFAULT = Schedule(20, confidence=0.4)  # transformers' default
SCHEDULES = (
    *(Schedule(tokens) for tokens in CONSTANT_LENGTHS),
    Schedule(5, "heuristic"),
    *(Schedule(20, confidence=threshold) for threshold in CONFIDENCES),
)


def assisted_refusal(settings: Settings, pair: LoadedPair) -> str | None:
    """A sentence on why transformers' assisted generation cannot be a baseline here; None if it can."""
    if max(settings.batch_sizes) > 1 and min(settings.batch_sizes) > 1:
        return "transformers' assisted generation and prompt lookup are left out: they need batch size 1."
    if settings.sampling and pair.draft is not None and not _same_vocabulary(pair):
        return (
            "transformers' assisted generation is left out: the vocabularies of target and draft differ in size, and "
            "to sample it would cut the draft's head for good."
        )
    return None


def assisted(settings: Settings, pair: LoadedPair, schedule: Schedule | None = None) -> Contender:
    """transformers' assisted generation; the default schedule is our lookahead, constant, without an early stop.

    If vocabularies differ in size, transformers needs both tokenizers and drafts through text.
    """
    chosen = schedule or Schedule(fixed_lookahead(settings, pair))
    models: dict[str, Any] = {}
    title = "transformers' assisted generation"
    if not _same_vocabulary(pair):
        models = {"tokenizer": pair.tokenizer, "assistant_tokenizer": pair.draft_tokenizer}
        title += " (through both tokenizers)"
    name = "assisted" if schedule is None else f"assisted {chosen.words}"
    return _with_draft(settings, pair, chosen, Method(name, f"{title}, {chosen.words}", "assisted"), models)


def assisted_baselines(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """Assisted generation with our lookahead and with transformers' default, except for random texts.

    For a target with its own drafter: that drafter in transformers' loop.
    """
    if settings.drafter in OWN_DRAFTERS:
        return own_drafts(settings, pair)
    if not can_assist(pair):
        return []
    schedules = (None,) if pair.synthetic is not None else (None, DEFAULT)
    return [assisted(settings, pair, schedule) for schedule in schedules]


def ensemble(settings: Settings, pair: LoadedPair, weight: float = ENSEMBLE_WEIGHT) -> Contender:
    """transformers' lossy ensemble: drafts are judged by weight · target + (1 - weight) · draft."""
    title = f"transformers' assisted generation, ensemble weight {weight:g} (lossy)"
    method = Method("ensemble", title, "ensemble", keywords={"assistant_ensemble_weight": weight})
    return _with_draft(settings, pair, Schedule(fixed_lookahead(settings, pair)), method, {})


def _with_draft(
    settings: Settings, pair: LoadedPair, schedule: Schedule, method: Method, models: dict[str, Any]
) -> Contender:
    assert pair.draft is not None
    constant = schedule.kind == "constant"
    return Contender(
        replace(
            method,
            lookahead=schedule.tokens if constant and not schedule.confidence else None,
            draft=pair.draft_name,
            draft_parameters=pair.draft.num_parameters(),
        ),
        pair,
        schedule.tokens if constant else _GROWN,
        {"assistant_model": pair.draft, **models},
        most_rows=1,
        surroundings=lambda loaded: _watched_drafts(loaded, schedule),
        # An ensemble also accepts tokens with which the target disagrees.
        read_rounds=_reader(settings, tells_overlap=method.kind != "ensemble", draft_passes=True),
    )


def can_assist(pair: LoadedPair) -> bool:
    """Whether there is a draft that transformers' loop supports without further arguments."""
    return pair.draft is not None and not isinstance(pair.draft, Eagle3Draft) and not drafts_blocks(pair.draft)


def can_ensemble(pair: LoadedPair) -> bool:
    """Whether target and draft share one vocabulary, so that an ensemble can mix their distributions."""
    return can_assist(pair) and _same_vocabulary(pair)


def prompt_lookup(settings: Settings, pair: LoadedPair) -> Contender:
    """transformers' prompt lookup, which drafts what followed the same words earlier in the text."""
    title = f"transformers' prompt lookup ({LOOKUP_TOKENS} tokens)"
    keywords = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    return Contender(
        Method("prompt_lookup", title, "lookup", lookahead=LOOKUP_TOKENS, keywords=keywords),
        pair,
        LOOKUP_TOKENS,
        most_rows=1,
        surroundings=lambda loaded: _watched(candidate_generator.PromptLookupCandidateGenerator),
        read_rounds=_reader(settings, tells_overlap=True, draft_passes=False),
    )


def own_drafts(settings: Settings, pair: LoadedPair) -> list[Contender]:
    """transformers' loop with the target's multi-token-prediction layers, or with its DFlash draft.

    Empty for recurrent targets, which transformers refuses. It loads the layers again in each call.

    Raises:
        BenchError: the target has no such layers.
    """
    if is_stateful(pair.target):
        return []
    keywords: dict[str, Any]
    models: dict[str, Any] = {}
    if settings.drafter == "mtp":
        try:
            generator, length = candidate_generator.MTPCandidateGenerator, len(mtp_layers(pair.target).layers)
        except ValueError as error:
            raise BenchError(" ".join(str(error).split())) from error
        name, drafts, keywords = "use_mtp", f"{length} multi-token-prediction layers", {"use_mtp": True}
    else:
        assert pair.draft is not None
        models = {"assistant_model": pair.draft}
        generator, length = candidate_generator.DFlashTokenCandidateGenerator, pair.draft.config.block_size - 1
        name, drafts, keywords = "dflash", f"blocks of {length} drafts", {"speculation_type": "dflash"}
    title = f"transformers' assisted generation, {drafts}"
    found = Contender(
        Method(name, title, "assisted", lookahead=length, keywords=keywords),
        pair,
        length,
        models,
        most_rows=1,
        surroundings=lambda loaded: _watched(generator),
        read_rounds=_reader(settings, tells_overlap=True, draft_passes=True),
    )
    return [found]


def _same_vocabulary(pair: LoadedPair) -> bool:
    return len({model.config.get_text_config().vocab_size for model in pair.models}) == 1


def _reader(settings: Settings, *, tells_overlap: bool, draft_passes: bool) -> ReadRounds:
    greedy = tells_overlap and not settings.sampling

    def read(pair: LoadedPair, tokens: list[list[int]], puts: Sequence[int], log: Sequence[Tensor]) -> Rounds:
        drafts = [drafted.tolist() for drafted in log]
        return streamed_rounds(tokens[0], puts, drafts, greedy=greedy, draft_passes=draft_passes)

    return read


@contextmanager
def _watched_drafts(pair: LoadedPair, schedule: Schedule) -> Iterator[list[Tensor]]:
    """Set the draft's generation_config for transformers' loop; yield a list that collects its drafts, one per round.

    transformers reads lookahead, schedule and confidence threshold only from there. It calls the draft's generate()
    once a round, so watching that costs a microsecond a round. Both are restored.
    """
    draft: Any = pair.draft
    saved, generate = draft.generation_config, draft.generate
    drafted: list[Tensor] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        start = kwargs["decoder_input_ids"] if "decoder_input_ids" in kwargs else kwargs["input_ids"]
        drafted.append(output.sequences[0, start.shape[1] :])
        return output

    config = copy.deepcopy(saved)
    config.num_assistant_tokens = schedule.tokens
    config.num_assistant_tokens_schedule = schedule.kind
    config.assistant_confidence_threshold = schedule.confidence
    with patch.object(draft, "generation_config", config), patch.object(draft, "generate", watched):
        yield drafted


@contextmanager
def _watched(generator: Any) -> Iterator[list[Tensor]]:
    """Yield a list that collects the proposals of a candidate generator of transformers, `[length]` per round."""
    get_candidates = generator.get_candidates
    found: list[Tensor] = []

    def watched(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        candidates = get_candidates(self, input_ids, **kwargs)
        found.append(candidates[0][0, input_ids.shape[1] :])
        return candidates

    with patch.object(generator, "get_candidates", watched):
        yield found
