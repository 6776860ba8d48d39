"""One row's text in the vocabularies of target and draft."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile

from hf_specdec.drafting.two_vocabularies import UNFINISHED, TwoVocabularies

# The number of last tokens to encode again when a text continues, since what follows may change them.
LOOKBEHIND = 8
_LONGEST_CHARACTER = 4  # bytes, each of which can be a token


class RowText:
    """A row's text, which follows the target's tokens.

    Special tokens are replaced by the draft's counterparts, or left out if there are none. The text after one is
    encoded with it but without what precedes it, since some tokenizers add a space except after a special token.

    Args:
        vocabularies: the vocabularies of target and draft.
        rewrites: encode the last words again when the text continues, as the draft's tokenizer would. Without it,
            `tokens` only grow.

    Attributes:
        tokens: the text in the draft's vocabulary.
    """

    def __init__(self, vocabularies: TwoVocabularies, *, rewrites: bool = True) -> None:
        self._vocabularies = vocabularies
        self._rewrites = rewrites
        self.tokens: list[int] = []
        self._begin = 0  # index in `tokens` of the last special one
        self._run: list[int] = []  # the target's tokens from its last special one on
        self._told = 0  # how many of them are in `tokens`, which excludes an incomplete character

    def open(self, opening: Sequence[int]) -> None:
        """Prepend the draft's opening special tokens, unless the text begins with them."""
        if self.tokens[: len(opening)] != list(opening):
            self.tokens[:0] = opening
            self._begin += len(opening)

    def extend(self, added: Sequence[int], drafts: Sequence[int] = ()) -> int:
        """Append the target's tokens.

        Args:
            added: in the target's vocabulary.
            drafts: the tokens that the draft has read after `tokens`.

        Returns:
            The number of leading tokens that the draft has read.
        """
        first = len(self.tokens) - len(self._tail())
        read = [*self.tokens[first:], *drafts]
        for is_special, run in groupby(added, self._vocabularies.target.special.__contains__):
            if is_special:
                for token in run:
                    self._mark(token)
            else:
                self._run += run
                self._tell()
        agree = takewhile(lambda pair: pair[0] == pair[1], zip(read, self.tokens[first:], strict=False))
        return first + sum(1 for _ in agree)

    def translated(self, drafts: Sequence[int]) -> list[int]:
        """Translate drafts that follow `tokens` into the target's vocabulary, up to the first special one."""
        draft, target = self._vocabularies.draft, self._vocabularies.target
        closing = self._vocabularies.to_target
        words = list(takewhile(lambda token: token not in draft.special and token not in closing, drafts))
        tail, found = self._tail(), []
        text = draft.text([*tail, *words]).rstrip(UNFINISHED)[len(draft.text(tail)) :]
        if text:
            known = self._run[-LOOKBEHIND:]
            begins = len(known) == len(self._run)
            found = target.continued(known, text, len(known), is_beginning=begins)[len(known) :]
        return found + [closing[token] for token in drafts[len(words) : len(words) + 1] if token in closing]

    def _mark(self, special: int) -> None:
        """Append a special token of the target."""
        both = self._vocabularies
        counterpart = both.to_draft.get(special)
        self._begin = len(self.tokens)
        if counterpart is not None:
            self.tokens.append(counterpart)
            self._begin += counterpart in both.draft.opening
        self._run = [] if special in both.target.opening else [special]
        self._told = len(self._run)

    def _tell(self) -> None:
        """Append the text of the target's last tokens to `tokens`, up to the last complete character."""
        text_of = self._vocabularies.target.text
        before, new = self._run[max(self._told - LOOKBEHIND, 0) : self._told], self._run[self._told :]
        for unfinished in range(min(_LONGEST_CHARACTER, len(new) + 1)):
            told = new[: len(new) - unfinished]
            text = text_of([*before, *told])
            if not text.endswith(UNFINISHED):
                break
        else:
            told, text = new, text_of([*before, *new])
        self._told += len(told)
        said = text[len(text_of(before)) :]
        if said:
            tail, draft = self._tail(), self._vocabularies.draft
            begin = len(self.tokens) - len(tail)
            keep = sum(1 for _ in takewhile(draft.special.__contains__, tail)) if self._rewrites else len(tail)
            self.tokens[begin:] = draft.continued(tail, said, keep, is_beginning=begin == self._begin)

    def _tail(self) -> list[int]:
        """The last tokens, which may be encoded again when the text continues."""
        return self.tokens[max(self._begin, len(self.tokens) - LOOKBEHIND) :]
