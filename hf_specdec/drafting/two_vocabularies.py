"""The vocabularies of target and draft, and the special tokens that correspond to each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.models.traits import MAX_VOCABULARY_PADDING, vocabulary_size

# The decoded text of a character's first bytes.
UNFINISHED = "\ufffd"


class Vocabulary:
    """One tokenizer's tokens and texts.

    Attributes:
        special: the tokens that are not text, by name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        added = added if isinstance(added, dict) else {}  # Mistral's own tokenizers have none
        ids = sorted({*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)})
        self.special = frozenset(ids)
        self.names = dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens with which the tokenizer begins every text."""
        marked = self.tokenizer("a")["input_ids"]
        return list(takewhile(self.special.__contains__, marked[: len(marked) - len(self.tokens("a"))]))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; ends in `UNFINISHED` if the last character is incomplete."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def tokens(self, text: str) -> list[int]:
        """The tokens of `text`."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []

    def continued(self, tail: list[int], text: str, keep: int, *, is_beginning: bool) -> list[int]:
        """The tokens of a text that begins with those of `tail` and continues with `text`.

        A continuation can change earlier tokens: `under` becomes `understand`. So the tail is encoded again. If that
        changes tokens that must stay, a shorter tail is used, since it may have begun within a word.

        Args:
            tail: a text's last tokens.
            text: the text that follows them.
            keep: the number of leading tokens of `tail` that must stay.
            is_beginning: whether the text begins with `tail`.
        """
        whole = self.text(tail).rstrip(UNFINISHED) + text
        for begin in range(0 if is_beginning else 1, len(tail)):
            before = self.text(tail[:begin])
            if before.endswith(UNFINISHED):
                continue
            found = self._within(whole[len(before) :]) if begin else self.tokens(whole)
            fixed = max(keep - begin, min(begin, 1))
            if found[:fixed] == tail[begin : begin + fixed]:
                return tail[:begin] + found
        return tail + (self._within(text) if tail else self.tokens(text))

    def _within(self, text: str) -> list[int]:
        """The tokens of `text` in the middle of another; many tokenizers add a space at the beginning of a text."""
        found, line_end = self.tokens(f"\n{text}"), self._line_end
        return found[len(line_end) :] if found[: len(line_end)] == line_end else self.tokens(text)

    @cached_property
    def _line_end(self) -> list[int]:
        return self.tokens("\n")


class TwoVocabularies:
    """The vocabularies of target and draft.

    Args:
        tokenizer, assistant_tokenizer: the target's and the draft's.
        target_ends, draft_ends: the tokens that end a text.

    Attributes:
        to_draft, to_target: the counterparts of special tokens, by role or by name.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        assistant_tokenizer: PreTrainedTokenizerBase,
        target_ends: Iterable[int] = (),
        draft_ends: Iterable[int] = (),
    ) -> None:
        self.target, self.draft = Vocabulary(tokenizer), Vocabulary(assistant_tokenizer)
        pairs = [
            (tokenizer.bos_token_id, assistant_tokenizer.bos_token_id),
            (tokenizer.eos_token_id, assistant_tokenizer.eos_token_id),
            *((ours, self.draft.names.get(name)) for name, ours in self.target.names.items()),
        ]
        both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
        self.to_draft, self.to_target = dict(both), {theirs: ours for ours, theirs in both}
        ends = sorted(target_ends, key=lambda token: token != tokenizer.eos_token_id)
        for token in {*draft_ends, assistant_tokenizer.eos_token_id} - {None}:
            if self.to_target.get(token) not in ends and ends:
                self.to_target[token] = ends[0]


@dataclass(frozen=True)
class _Comparison:
    """Whether two tokenizers of these sizes have different vocabularies."""

    sizes: tuple[int, int]
    differ: bool


_Compared = WeakKeyDictionary[PreTrainedTokenizerBase, _Comparison]
_compared: WeakKeyDictionary[PreTrainedTokenizerBase, _Compared] = WeakKeyDictionary()


def tokenizers_disagree(
    tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
) -> bool:
    """Whether both are given and have different vocabularies; compared once, as large ones take tenths of a second."""
    if tokenizer is None or assistant_tokenizer is None or tokenizer is assistant_tokenizer:
        return False
    sizes, compared = (len(tokenizer), len(assistant_tokenizer)), _compared.setdefault(tokenizer, WeakKeyDictionary())
    known = compared.get(assistant_tokenizer)
    if known is None or known.sizes != sizes:
        known = _Comparison(sizes, tokenizer.get_vocab() != assistant_tokenizer.get_vocab())
        compared[assistant_tokenizer] = known
    return known.differ


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
