"""Drafting with a model that has another tokenizer: it reads each row's text in its own vocabulary.

In each round the changed end of the text is encoded again, and the draft's cache is rolled back to the unchanged part.
Drafts are decoded, and encoded by the target's tokenizer. They are point masses, so no probabilities in the target's
vocabulary are needed. Drawing from the tokens that both vocabularies share (Timor et al. 2025, arXiv 2502.05202,
algorithm 4) was tried: fewer tokens of trained pairs were accepted, in sampling too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as host

from hf_specdec.drafting.drafter import DraftProposal, no_drafts, point_masses, usable
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.drafting.row_text import RowText
from hf_specdec.drafting.two_vocabularies import TwoVocabularies
from hf_specdec.host.processors import SCORES_ONLY, HostProcessors
from hf_specdec.models.cache_rollback import has_recurrent_layers
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.models.runner_choice import Runner
from hf_specdec.models.traits import context_length, on_device, vocabulary_size

# Most draft tokens per new token of the target for which room is reserved; longer texts get no drafts.
MOST_TOKENS_PER_TOKEN = 4
GROWTH = 256  # columns to add at a time


class DraftTexts:
    """The rows' texts in the draft's vocabulary, left-aligned after some padding.

    Args:
        vocabularies: the vocabularies of target and draft.
        prompts: `[B, P]`, in the target's vocabulary.
        mask: `[B, P]`, where the prompts are not padding; None without padding.
        opening: the tokens that begin the draft's texts.
        new_tokens: the most tokens of the target's row after its prompt, including drafts.
        positions: the draft's context length; None if it is unlimited.
        size: the size of the draft's vocabulary.
        rewrites: see `RowText`.

    Attributes:
        rows: a text per row.
        lengths: their numbers of tokens, including padding.
        prompts, mask: `[B, P']`, the initial texts and where they are not padding, on the prompts' device.
        capacity: the most tokens of a text in `ids`, limited by the draft's positions.
        ids: `[B, N]`, the texts; replaced by a longer tensor as they grow.
    """

    def __init__(
        self,
        vocabularies: TwoVocabularies,
        prompts: Tensor,
        mask: Tensor | None,
        *,
        opening: Sequence[int],
        new_tokens: int,
        positions: int | None,
        size: int,
        rewrites: bool,
    ) -> None:
        self.rows = [RowText(vocabularies, rewrites=rewrites) for _ in range(len(prompts))]
        seen = torch.ones_like(prompts).tolist() if mask is None else mask.tolist()
        for row, tokens, visible in zip(self.rows, prompts.tolist(), seen, strict=True):
            row.extend([token for token, shown in zip(tokens, visible, strict=True) if shown])
            row.open(opening)
        self._size = size
        self._known = [prompts.shape[1]] * len(self.rows)  # number of the target's tokens in each row's text
        width = max(1, *(len(row.tokens) for row in self.rows))
        self._padding = [width - len(row.tokens) for row in self.rows]
        self.lengths = [width] * len(self.rows)
        most = width + MOST_TOKENS_PER_TOKEN * new_tokens
        self.capacity = most if positions is None else min(most, max(positions + 1, width))
        self.ids = prompts[:, :0]
        self._write(0)
        self.prompts = self.ids[:, :width]
        # The last column of a row without a text is visible, since attention needs at least one key.
        shown = [min(padding, width - 1) for padding in self._padding]
        columns, device = torch.arange(width, device=prompts.device), prompts.device
        self.mask = (columns >= on_device(shown, device).unsqueeze(1)).long()
        self._stale = width  # the first column of `ids` that may be outdated

    def follow(
        self, ids: Tensor, lengths: Sequence[int], rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[int]:
        """Update the texts from the target's.

        Args:
            ids, lengths: see `Drafter.propose`.
            rows: the rows that have not ended.
            drafts: the tokens that the draft has read after each row's previous text.

        Returns:
            The number of each row's leading tokens that the draft has read.
        """
        same = list(self.lengths)
        first = min(self._known[row] for row in rows)
        added = ids[:, first : max(lengths)].tolist()
        for row in rows:
            more = added[row][self._known[row] - first : lengths[row] - first]
            same[row] = self._padding[row] + self.rows[row].extend(more, drafts[row])
            self._stale = min(self._stale, self.lengths[row], same[row])
            self._known[row] = lengths[row]
            self.lengths[row] = self._padding[row] + len(self.rows[row].tokens)
        if max(self.lengths) <= self.capacity:
            self._write(self._stale)
            self._stale = max(self.lengths)
        return same

    def _write(self, first: int) -> None:
        """Write the texts to `ids` from column `first` on."""
        end = max(self.lengths)
        if end >= self.ids.shape[1]:
            more = min(self.capacity, end + GROWTH) - self.ids.shape[1]
            self.ids = torch.nn.functional.pad(self.ids, (0, more))
        columns = [self._columns(row, first, end) for row in range(len(self.rows))]
        self.ids[:, first:end] = torch.tensor(columns, dtype=torch.long, device="cpu").clamp(max=self._size - 1)

    def _columns(self, row: int, first: int, end: int) -> list[int]:
        padding, tokens = self._padding[row], self.rows[row].tokens
        found = [0] * max(padding - first, 0) + tokens[max(first - padding, 0) : end - padding]
        return found + [0] * (end - first - len(found))


@dataclass(frozen=True)
class TranslatedInputs:
    """The draft's translation of the target's inputs.

    Args:
        texts: the prompts, which grow into the texts.
        model_kwargs, inputs_tensor: as for `draft_inputs`.
    """

    texts: DraftTexts
    model_kwargs: dict[str, Any]
    inputs_tensor: Tensor | None


def translated_inputs(
    vocabularies: TwoVocabularies,
    draft: PreTrainedModel,
    prompts: Tensor,
    new_tokens: int,
    model_kwargs: dict[str, Any],
    inputs_tensor: Tensor | None,
) -> TranslatedInputs:
    """Translate the target's inputs for a draft with another tokenizer.

    Args:
        vocabularies: the vocabularies of target and draft.
        draft: the draft model.
        prompts: `[B, P]`, in the target's vocabulary.
        new_tokens: the most tokens of a row after its prompt, including drafts.
        model_kwargs: as prepared by `generate` for the target. Only masks and encodings are used: others, such as
            token types, refer to the target's tokens.
        inputs_tensor: `[B / num_return_sequences, ...]`, the encoder's inputs.
    """
    encoded = "encoder_outputs" in model_kwargs
    prompt_mask = "decoder_attention_mask" if encoded else "attention_mask"
    mask = model_kwargs.get(prompt_mask)
    start = getattr(draft.generation_config, "decoder_start_token_id", None)
    texts = DraftTexts(
        vocabularies,
        prompts.to(draft.device),
        None if mask is None else mask[:, -prompts.shape[1] :],
        opening=vocabularies.draft.opening if not encoded else [start] if isinstance(start, int) else [],
        new_tokens=new_tokens,
        positions=context_length(draft),
        size=vocabulary_size(draft),
        rewrites=not has_recurrent_layers(draft),
    )
    kwargs: dict[str, Any] = {key: model_kwargs[key] for key in ("use_cache", "encoder_outputs") if key in model_kwargs}
    kwargs[prompt_mask] = texts.mask
    if encoded:
        kwargs["attention_mask"] = model_kwargs.get("attention_mask")
        if inputs_tensor is not None and not torch.is_floating_point(inputs_tensor) and int(inputs_tensor.min()) >= 0:
            copies = len(prompts) // len(inputs_tensor)
            inputs_tensor, mask = _translated_source(vocabularies, inputs_tensor, kwargs["attention_mask"], copies)
            kwargs["attention_mask"] = mask.repeat_interleave(copies, 0)
    return TranslatedInputs(texts, kwargs, inputs_tensor)


def _translated_source(
    vocabularies: TwoVocabularies, source: Tensor, mask: Tensor | None, copies: int
) -> tuple[Tensor, Tensor]:
    """An encoder's inputs `[B', S]` in the draft's vocabulary, padded on the right, and their mask.

    Args:
        vocabularies: the vocabularies of target and draft.
        source: `[B', S']`, in the target's vocabulary.
        mask: `[B' * copies, S']`, their mask; None without padding.
        copies: rows per input.
    """
    rows = []
    for tokens, shown in zip(source, source == source if mask is None else mask[::copies], strict=True):
        text = RowText(vocabularies)
        text.extend(tokens[shown.bool()].tolist())
        rows.append(text.tokens or [0])
    width, device = max(map(len, rows)), source.device
    padded = [row + [0] * (width - len(row)) for row in rows]
    lengths = on_device([len(row) for row in rows], device)
    shown = (torch.arange(width, device=device) < lengths.unsqueeze(1)).long()
    return torch.tensor(padded, device="cpu").to(device), shown


def of_any_vocabulary(processors: HostProcessors) -> HostProcessors:
    """The processors that depend only on scores and a few numbers."""
    fitting = (
        p for p in processors.processors if type(p) in SCORES_ONLY and type(p) is not host.SuppressTokensLogitsProcessor
    )
    return HostProcessors(LogitsProcessorList(fitting))


class OtherTokenizerDrafter(ModelDrafter):
    """Draft in the draft's vocabulary and translate the drafts as text. They are point masses.

    Args:
        runner, processors, rule, settings: see `ModelDrafter`; tokens are in the draft's vocabulary.
        texts: the rows' texts in the draft's vocabulary.
        new_runner: makes a fresh runner, to replace one that cannot be rolled back far enough.
        target_size: the size of the target's vocabulary.
        target_ends: the target's tokens that end a text.
        caller_processors: the caller's processors, which may read the drafts.
    """

    def __init__(
        self,
        *args: Any,
        texts: DraftTexts,
        new_runner: Callable[[], Runner],
        target_size: int,
        target_ends: frozenset[int],
        caller_processors: HostProcessors,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self._texts = texts
        self._new_runner = new_runner
        self._target_size, self._target_ends = target_size, target_ends
        self._caller_processors = caller_processors
        self._drafts: list[list[int]] = [[] for _ in texts.rows]  # the last drafts, in the draft's vocabulary

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """Draft in the draft's own vocabulary, and translate the drafts into the target's."""
        if min(self.rule.limit, max(room)) <= 0:
            return no_drafts(ids)  # the texts are updated when they are needed
        same = self._texts.follow(ids, lengths, self._rows, self._drafts)
        self._read = [min(pair) for pair in zip(self._read, same, strict=True)]
        self._renew_runner_if_out_of_reach()
        room = [space if text.tokens else 0 for space, text in zip(room, self._texts.rows, strict=True)]
        proposal = super().propose(self._texts.ids, self._texts.lengths, room)
        self._drafts = [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.lengths, strict=True)]
        found = []
        for text, drafts, space in zip(self._texts.rows, self._drafts, room, strict=True):
            tokens = text.translated(drafts)[: min(space, self.rule.limit)] if drafts else []
            found.append(usable(tokens, self._target_size, self._target_ends))
        return replace(point_masses(ids, lengths, found, self._caller_processors), steps=proposal.steps)

    def _renew_runner_if_out_of_reach(self) -> None:
        """Read the texts from the beginning if a recurrent draft cannot be rolled back to the unchanged part."""
        if not isinstance(self.runner, RecurrentRunner):
            return
        # The last token of each text is read by the first draft step.
        if not self.runner.reaches([min(n, end - 1) for n, end in zip(self._read, self._texts.lengths, strict=True)]):
            self.runner = self._new_runner()
            self.runner.retain(self._rows)
            self._read = list(self.runner.read)
