"""A suffix automaton: all substrings of growing texts, with the counts of what followed each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hf_specdec.lengths.chances import Step

# A token is counted after at most this many contexts, the longest first. There are usually fewer, unless a text repeats
# itself many times: then the short contexts are left alone, which it would otherwise fill with one continuation.
MOST_CONTEXTS = 32


class SuffixAutomaton:
    """The automaton of Blumer et al. (1985), for several texts that grow alternately.

    A state represents strings that end at the same places; its link leads to their longest suffix that ends at more
    places. State 0 is the empty string. Appending takes amortized constant time.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # length of a state's longest string
        self._count = [0]  # number of places at which a state's strings end
        self._total = [0]  # number of these places that a token follows
        self._best = [-1]  # the most frequent of these tokens

    def append(self, state: int, token: int) -> int:
        """Append a token to the text with this state; 0 begins a new text.

        Returns:
            The state of the longer text.
        """
        following, link, length = self._next, self._link, self._length
        known = following[state].get(token)
        if known is not None:
            ended = self._exact(state, token, known)
        else:
            ended = self._new(length[state] + 1, {}, 0)
            context = state
            while context >= 0 and token not in following[context]:
                following[context][token] = ended
                context = link[context]
            if context >= 0:
                link[ended] = self._exact(context, token, following[context][token])
        self._note(state, token)
        return ended

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow a text that is not part of the automaton by one token.

        Args:
            state, length: the text's longest suffix in the automaton, and its number of tokens.

        Returns:
            The same for the text with the token appended.
        """
        following, link = self._next, self._link
        while state and length <= self._length[link[state]]:  # the state was split since
            state = link[state]
        while state and token not in following[state]:
            state = link[state]
            length = self._length[state]
        after = following[state].get(token)
        return (0, 0) if after is None else (after, length + 1)

    def follow(self, state: int, length: int | None = None) -> Iterator[Step]:
        """Yield the most frequent continuation of the longest suffix that has one; endless if not empty.

        Args:
            state: the text's state.
            length: the number of last tokens that the state represents; None for the state's longest string.
        """
        following, link, best = self._next, self._link, self._best
        matched = self._length[state] if length is None else length
        while True:
            while state > 0 and best[state] < 0:
                state = link[state]
                matched = min(matched, self._length[state])
            if state <= 0:
                return
            token = best[state]
            after = following[state][token]
            yield Step(token, matched, self._count[after], self._total[state])
            state, matched = after, matched + 1

    def extend(self, state: int, tokens: Sequence[int]) -> int:
        """Append several tokens, see `append`."""
        for token in tokens:
            state = self.append(state, token)
        return state

    def _new(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._total.append(0)
        self._best.append(-1)
        return len(self._link) - 1

    def _exact(self, context: int, token: int, after: int) -> int:
        """The state of the longest string of `context` plus a token: `after`, or a state split from it."""
        length = self._length[context] + 1
        if self._length[after] == length:
            return after
        part = self._new(length, dict(self._next[after]), self._link[after])
        for kept in (self._count, self._total, self._best):
            kept[part] = kept[after]
        self._link[after] = part
        while context >= 0 and self._next[context].get(token) == after:
            self._next[context][token] = part
            context = self._link[context]
        return part

    def _note(self, state: int, token: int) -> None:
        """Count a token in all contexts to which it was appended."""
        following, count, best, counted = self._next, self._count, self._best, -1
        for _ in range(MOST_CONTEXTS):
            after = following[state][token]
            if after != counted:
                count[after] += 1
                counted = after
            self._total[state] += 1
            if best[state] != token and count[after] >= count[following[state].get(best[state], after)]:
                best[state] = token
            state = self._link[state]
            if state < 0:
                return
