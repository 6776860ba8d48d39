"""What a draft model would have drafted at each place of an answer, from one pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec.bench.aligning.batches import Collator, answer_logits
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import Settings
from hf_specdec.drafting.drafter import BaseDrafter, DraftProposal, point_masses, usable
from hf_specdec.drafting.model_drafter import align_vocabulary
from hf_specdec.host.processors import HostProcessors
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.traits import vocabulary_size
from hf_specdec.rules import sampling


@dataclass(frozen=True)
class Predicted:
    """A draft model's view of an answer of T tokens.

    Args:
        tokens: [T], the draft's choice at each place, given the answer's own tokens before it.
        overlap: [T], in sampling Σ min(p, q) of both models' distributions there, the probability that the target
            accepts; None in greedy decoding.
    """

    tokens: tuple[int, ...]
    overlap: tuple[float, ...] | None = None

    def drawn(self, answer: Sequence[int], vocabulary: int, seed: int) -> Predicted:
        """Draw drafts: at each place the answer's token with probability `overlap`, otherwise another token."""
        if self.overlap is None:
            return self
        draws = torch.rand(len(answer), generator=torch.Generator().manual_seed(seed)).tolist()
        chances = zip(answer, self.overlap, draws, strict=True)
        tokens = (token if draw < chance else (token + 1) % vocabulary for token, chance, draw in chances)
        return replace(self, tokens=tuple(tokens))


@torch.no_grad()
def predicted(pair: LoadedPair, prompt: Sequence[int], answer: Sequence[int], settings: Settings) -> Predicted:
    """Predict the draft's choices from one pass of it over prompt and answer; in sampling also one of the target.

    The logits go through the processors that generate() would make, as in real drafting.
    """
    assert pair.draft is not None
    ids = torch.tensor([[*prompt, *answer]], device=pair.draft.device)
    batch = Collator(pair)([{"prompt": list(prompt), "answer": list(answer)}])
    processors = HostProcessors(_processors(pair, ids[:, : len(prompt)], settings))

    def scores(model: PreTrainedModel) -> Tensor:
        logits = align_vocabulary(answer_logits(model, batch), vocabulary_size(pair.target)).to(ids.device)
        return processors(ids, [len(prompt)], [len(answer)], logits.float().unsqueeze(0))[0]

    draft = scores(pair.draft)
    tokens = tuple(draft.argmax(dim=-1).tolist())
    if not settings.sampling:
        return Predicted(tokens)
    both = torch.minimum(sampling.probabilities(draft), sampling.probabilities(scores(pair.target)))
    return Predicted(tokens, tuple(both.sum(dim=-1).tolist()))


def _processors(pair: LoadedPair, prompt: Tensor, settings: Settings) -> LogitsProcessorList:
    """The processors that generate() makes for the target, built by the draft since the target may not be loaded."""
    config = deepcopy(pair.target.generation_config)
    config.update(**settings.generate_kwargs(), max_new_tokens=settings.max_new_tokens)

    def made(model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, *_: Any, **__: Any) -> Any:
        return logits_processor

    assert pair.draft is not None
    mask = torch.ones_like(prompt)
    found: Any = pair.draft.generate(prompt, attention_mask=mask, generation_config=config, custom_generate=made)
    return found if isinstance(found, LogitsProcessorList) else LogitsProcessorList()


class PredictedDrafter(BaseDrafter):
    """Drafts what a draft model would draft along the known answer.

    After its first mistake a real draft model would continue differently, but the target rejects all of that anyway.

    Args:
        rule: limits the number of drafts.
        start: the length of the prompt.
        found: the draft model's choices.
        eos_tokens: tokens after which a draft ends.
        compiled: whether the rounds are compiled; such a round always runs all of its draft steps.
    """

    def __init__(
        self, rule: StopRule, start: int, found: Predicted, eos_tokens: frozenset[int], *, compiled: bool = False
    ) -> None:
        super().__init__(rule)
        self.start, self.tokens, self.eos_tokens, self.compiled = start, found.tokens, eos_tokens, compiled
        if compiled:
            rule.use_prepared(lambda lookahead: True)

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Propose the model's choices at the next places of the answer."""
        place, count = lengths[0] - self.start, max(min(self.rule.limit, room[0]), 0)
        drafts = list(self.tokens[place : place + count])
        drafts += [max(self.eos_tokens, default=0) + 1] * (count - len(drafts))  # after the answer's end
        drafts = usable(drafts, max(drafts, default=0) + 1, self.eos_tokens)
        steps = self.rule.limit if self.compiled else len(drafts)
        return replace(point_masses(ids, lengths, [drafts], None), steps=steps)
