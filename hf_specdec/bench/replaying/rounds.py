"""Rounds over a known answer: drafts are accepted as far as they agree with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter

import torch
from transformers import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from hf_specdec.bench.replaying.times import RoundTimes
from hf_specdec.config import SpeculationConfig
from hf_specdec.drafting.drafter import Drafter
from hf_specdec.drafting.drafter_choice import DraftCall, make_drafter
from hf_specdec.drafting.hybrid import HybridDrafter
from hf_specdec.drafting.suffix import SuffixDrafter
from hf_specdec.drafting.suffix_memory import TOKENS_BEFORE
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.transcript import Transcript
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.rules.round_statistics import Round, reached_overlap


@dataclass(frozen=True)
class Known:
    """A text that was decoded before.

    Args:
        prompt, answer: token ids.
        eos_tokens: the tokens that end a text.
        max_new_tokens: the limit under which the answer was decoded.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    eos_tokens: Sequence[int]
    max_new_tokens: int

    def transcript(self, spare: int) -> Transcript:
        """The transcript at the start of the call; a text without an EOS ends at its last token."""
        ended = self.answer[-1] in self.eos_tokens
        most = len(self.prompt) + (self.max_new_tokens if ended else len(self.answer))
        criteria = StoppingCriteriaList([MaxLengthCriteria(most)])
        if self.eos_tokens:
            criteria.append(EosTokenCriteria(list(self.eos_tokens)))
        return Transcript(torch.tensor([self.prompt]), criteria, None, spare=spare)


def replayed(
    config: SpeculationConfig,
    known: Known,
    target: PreTrainedModel,
    times: RoundTimes,
    *,
    by_model: Callable[[StopRule], Drafter] | None = None,
    overlap: Sequence[float] | None = None,
    prepared: bool = False,
    unsteady: Iterator[float] | None = None,
) -> list[Round]:
    """The rounds in which the target would have decoded this answer.

    In greedy decoding these are the rounds of a real call. In sampling they are the rounds of a call that happened to
    draw this answer: a copied token is accepted if and only if it is the one that was drawn.

    Args:
        config: resolved settings. Their memory is copied from, and the answer is added to it, as in a call.
        target: read for its settings only, so its weights may be missing.
        times: the durations of drafting and verifying.
        by_model: makes the drafter that replaces the draft model, see `PredictedDrafter`.
        overlap: Σ min(p, q) of both models' distributions at each place of the answer, if drafts are sampled.
        prepared: whether rounds are compiled or captured, so that few widths are used.
        unsteady: factors by which the times that the drafter learns from differ from those that are returned.
    """
    transcript, memory = known.transcript(config.longest_draft + 1), config.suffix_memory
    call = DraftCall(
        model=target,
        draft=None,
        tokenizers=(None, None),
        transcript=transcript,
        processors=HostProcessors(LogitsProcessorList()),
        generation_config=target.generation_config,
        model_kwargs={},
        inputs_tensor=transcript.sequences,
        stand_in=by_model,
        remembered=() if memory is None else memory.automata(target),
    )
    drafter = make_drafter(config, call)
    rounds = []
    while not transcript.finished:
        rounds.append(_round(drafter, transcript, known.answer, times, overlap, prepared=prepared))
        drafter.observe(_slowed(rounds[-1], next(unsteady) if unsteady else 1.0))
        transcript.show()
    if memory is not None:
        memory.add(target, transcript.answers(TOKENS_BEFORE))
    return rounds


def _round(
    drafter: Drafter,
    transcript: Transcript,
    answer: Sequence[int],
    times: RoundTimes,
    overlap: Sequence[float] | None,
    *,
    prepared: bool,
) -> Round:
    began, length = perf_counter(), transcript.lengths[0]
    rest, room = answer[length - transcript.prompt_length :], max(transcript.room[0] - 1, 0)
    drafter.retain([0])
    drafts, steps, width = (_prepared_drafts if prepared else _drafts)(drafter, transcript, room)
    agreeing = takewhile(lambda both: both[0] == both[1], zip(drafts, rest, strict=False))
    accepted = sum(1 for _ in agreeing)
    agreed = [1.0] * accepted + [0.0] if overlap is None else overlap[len(answer) - len(rest) :]
    drafting, verifying = times.drafting(steps, perf_counter() - began), times.passes.verification(width)
    (new,) = transcript.append([rest[: accepted + 1]])
    return Round(
        drafted=(len(drafts),),
        accepted=(accepted,),
        new_tokens=(new,),
        overlap=(reached_overlap(agreed, accepted, len(drafts)),),
        draft_steps=steps,
        width=width,
        draft_seconds=drafting,
        verify_seconds=verifying,
        seconds=drafting + verifying,
        room=(room,),
    )


def _slowed(one: Round, factor: float) -> Round:
    drafting, verifying = factor * one.draft_seconds, factor * one.verify_seconds
    return replace(one, draft_seconds=drafting, verify_seconds=verifying, seconds=drafting + verifying)


def _drafts(drafter: Drafter, transcript: Transcript, room: int) -> tuple[list[int], int, int]:
    """A round's drafted tokens, the draft's steps, and the width of the target's pass."""
    proposal = drafter.propose(transcript.ids, transcript.lengths, [room])
    drafts = proposal.tokens[0, : proposal.lengths[0]].tolist()
    return drafts, proposal.steps, max(len(drafts), proposal.steps) + 1


def _prepared_drafts(drafter: Drafter, transcript: Transcript, room: int) -> tuple[list[int], int, int]:
    """As `_drafts`, if rounds are prepared, as `PreparedRounds` chooses. All widths that occur are taken as ready."""
    if not isinstance(drafter, (SuffixDrafter, HybridDrafter)):
        return _drafts(drafter, transcript, room)
    chosen = drafter.choose_prepared(transcript.ids, transcript.lengths, [room], lambda width: True)
    if chosen.modelled and isinstance(drafter, HybridDrafter):
        return _drafts(drafter.model, transcript, room)
    return list(chosen.tokens[0]), 0, chosen.width + 1
