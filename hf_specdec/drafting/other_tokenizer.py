"""Drafting with a model that has another tokenizer, through transformers' own candidate generators, batch size 1.

Those call the draft's `generate` in every round, as they do in transformers' assisted generation. The translator
is asked not to prune the draft's head, so that the draft model is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    UniversalSpeculativeDecodingGenerator,
)

from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.models.traits import vocabulary_size
from hf_specdec.rules.statistics import Round


class CrossTokenizerDrafter(CandidateGenerator):
    """A `Drafter` over one of transformers' generators for different tokenizers.

    Greedy decoding re-encodes the draft's text (point masses); sampling draws among the tokens that both
    vocabularies share (Timor et al. 2025, TLI), with their probabilities.
    """

    def __init__(
        self,
        generator: AssistedCandidateGeneratorDifferentTokenizers,
        lookahead: int,
        eos_tokens: frozenset[int],
    ) -> None:
        self.generator = generator
        self.eos_tokens = eos_tokens
        generator.num_assistant_tokens = lookahead
        generator.generation_config.assistant_confidence_threshold = 0.0

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """See `drafting.Drafter.propose`; one row."""
        length, space = lengths[0], room[0]
        if space <= 0:
            return DraftProposal(ids.new_zeros(1, 0), (0,))
        candidates, logits = self.generator.get_candidates(ids[:, :length].clone())
        tokens = candidates[:, length : length + space].to(ids.device)
        for position, token in enumerate(tokens[0].tolist()):
            if token in self.eos_tokens:
                tokens = tokens[:, : position + 1]
                break
        drafted = tokens.shape[1]
        ids[:, length : length + drafted] = tokens
        probs = None
        if logits is not None and drafted:
            probs = torch.softmax(logits[:, :drafted].to(ids.device, torch.float32), dim=-1)
        return DraftProposal(tokens, (drafted,), probs, steps=self.generator.num_assistant_tokens)

    def retain(self, rows: Sequence[int]) -> None:
        """There is one row."""

    def ahead(self) -> int:
        """See `drafting.Drafter.ahead`: nothing."""
        return 0

    def observe(self, finished: Round) -> None:
        """The lookahead is fixed."""

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`CandidateGenerator.get_candidates`: transformers' own."""
        return self.generator.get_candidates(input_ids, **kwargs)


def cross_tokenizer_drafter(
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    assistant_tokenizer: PreTrainedTokenizerBase,
    input_ids: Tensor,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    inputs_tensor: Tensor | None,
    *,
    vocabulary: int,
    lookahead: int,
    eos_tokens: frozenset[int],
) -> CrossTokenizerDrafter:
    """The drafter for a target and a draft of different tokenizers.

    Raises:
        ValueError: more than one row; transformers' generators take one.
    """
    if len(input_ids) > 1:
        raise ValueError(
            f"a batch of {len(input_ids)} rows with tokenizer and assistant_tokenizer that differ: transformers' "
            "candidate generators take one row, so call generate once per row or use a draft with the same tokenizer."
        )
    kwargs: dict[str, Any] = {
        "input_ids": input_ids,
        "assistant_model": draft,
        "generation_config": generation_config,
        "model_kwargs": model_kwargs,
        "inputs_tensor": inputs_tensor,
        "logits_processor": LogitsProcessorList(),
        "target_tokenizer": tokenizer,
        "assistant_tokenizer": assistant_tokenizer,
    }
    if generation_config.do_sample:
        translator = AssistantToTargetTranslator(tokenizer, assistant_tokenizer, vocabulary, draft, False)
        generator = UniversalSpeculativeDecodingGenerator(**kwargs, atm_translator=translator)
    else:
        generator = AssistedCandidateGeneratorDifferentTokenizers(**kwargs)
    return CrossTokenizerDrafter(generator, lookahead, eos_tokens)


def tokenizers_disagree(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> bool:
    """Whether both are given and map some token to different ids."""
    if tokenizer is None or assistant_tokenizer is None or tokenizer is assistant_tokenizer:
        return False
    return tokenizer.get_vocab() != assistant_tokenizer.get_vocab()


MAX_VOCABULARY_PADDING = 1024


def needs_translation(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether drafts have to be carried from one vocabulary to the other.

    Raises:
        ValueError: the vocabularies differ by more than padding and a tokenizer is missing.
    """
    if tokenizers_disagree(tokenizer, assistant_tokenizer):
        return True
    sizes = vocabulary_size(model), vocabulary_size(draft)
    if abs(sizes[0] - sizes[1]) <= MAX_VOCABULARY_PADDING:
        return False
    if tokenizer is None or assistant_tokenizer is None:
        raise ValueError(
            f"assistant_model={type(draft).__name__} has a vocabulary of {sizes[1]} tokens and the target one of "
            f"{sizes[0]}, which is more than padding: choose a draft with the target's tokenizer, or pass both "
            "tokenizer= and assistant_tokenizer=."
        )
    return False
