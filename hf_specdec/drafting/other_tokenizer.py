"""Drafting with a model that has another tokenizer, using transformers' candidate generators. Batch size 1 only.

The generators call the draft's `generate` in every round, as in transformers' assisted generation. The translator is
created without pruning the draft's head, so the draft model is not modified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.candidate_generator import (
    AssistantToTargetTranslator,
    AssistedCandidateGeneratorDifferentTokenizers,
    CandidateGenerator,
    UniversalSpeculativeDecodingGenerator,
)

from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.models.masks import attention_windows
from hf_specdec.models.traits import vocabulary_size
from hf_specdec.rules.round_statistics import Round


class CrossTokenizerDrafter(CandidateGenerator):
    """Adapt one of transformers' generators for different tokenizers to `Drafter`.

    Greedy decoding re-encodes the draft's text and returns point masses. Sampling draws from the tokens that both
    vocabularies share (Timor et al. 2025, TLI) and returns their probabilities.

    Args:
        generator: the generator of transformers.
        lookahead: the number of draft tokens per round, in the draft's tokenization.
        eos_tokens: drafts end after one of these.
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
        # Whatever cache the target uses: the generators crop the draft's, which has to be a dynamic one.
        generator.generation_config.cache_implementation = None
        keeps = _keeps_cache(generator.assistant_model)
        generator.generation_config.use_cache = generator.assistant_kwargs["use_cache"] = keeps

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """See `Drafter.propose`; takes a single row."""
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
        """See `Drafter.retain`; does nothing, since there is only one row."""

    def ahead(self) -> int:
        """See `Drafter.ahead`; drafts nothing."""
        return 0

    def observe(self, finished: Round) -> None:
        """See `Drafter.observe`; does nothing, since the lookahead is fixed."""

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`CandidateGenerator.get_candidates`, unchanged."""
        return self.generator.get_candidates(input_ids, **kwargs)


def _keeps_cache(draft: PreTrainedModel) -> bool:
    """Whether the draft's `generate` can make several passes over a cache that can be cropped afterwards.

    In transformers 5.17, sliding windows then return more keys than their masks are for. Drafts with such windows read
    their text anew in every pass.
    """
    if not any(attention_windows(draft.config).values()):
        return True
    layer, token = DynamicSlidingWindowLayer(sliding_window=2), torch.zeros(1, 1, 1, 1)
    layer.activate_past_recording()
    for _ in range(3):
        length, _ = layer.get_mask_sizes(1)
        keys, _ = layer.update(token, token)
    return bool(keys.shape[-2] == length)


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
    """Make the drafter for a target and a draft with different tokenizers.

    Raises:
        ValueError: there is more than one row, which transformers' generators don't support.
    """
    if len(input_ids) > 1:
        raise ValueError(
            f"a batch of {len(input_ids)} rows with different tokenizer and assistant_tokenizer: transformers' "
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
    """Whether both are given and have different vocabularies."""
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
    """Whether drafts have to be translated from one vocabulary to the other.

    Raises:
        ValueError: the vocabulary sizes differ by more than padding, and a tokenizer is missing.
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
