"""The suffix automaton against searches written from the definition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pytest

from hf_specdec.drafting import suffix_automaton
from hf_specdec.drafting.suffix_automaton import SuffixAutomaton
from hf_specdec.lengths.chances import Step


def searched(texts: Sequence[Sequence[int]], end: Sequence[int], order: Sequence[tuple[int, int]]) -> Step | None:
    """What most often followed the longest end of a text that something followed in `texts`, the latest of several.

    Args:
        order: text and place of each token in the order in which they came.
    """
    for length in range(len(end), 0, -1):
        last, followed, latest = list(end[len(end) - length :]), Counter[int](), dict[int, int]()
        for time, (text, place) in enumerate(order):
            if list(texts[text][place - length : place]) == last and place >= length:
                followed[texts[text][place]] += 1
                latest[texts[text][place]] = time
        if followed:
            token = max(followed, key=lambda token: (followed[token], latest[token]))
            return Step(token, length, followed[token], followed.total())
    return None


def grown(seed: int, automaton: SuffixAutomaton) -> tuple[int, int]:
    """The number of places of random texts at which the automaton is right, of those at which something is found."""
    chance = random.Random(seed)
    texts: list[list[int]] = [[] for _ in range(chance.choice((1, 1, 3)))]
    states, order, right, found = [0] * len(texts), list[tuple[int, int]](), 0, 0
    stranger, place = list[int](), (0, 0)
    tokens = chance.choice((2, 3, 8))
    for _ in range(chance.choice((20, 90))):
        row, token = chance.randrange(len(texts)), chance.randrange(tokens)
        order.append((row, len(texts[row])))
        texts[row].append(token)
        states[row] = automaton.append(states[row], token)
        stranger.append(chance.randrange(tokens + 1))
        place = automaton.advance(*place, stranger[-1])
        for steps, text in ((automaton.follow(states[row]), texts[row]), (automaton.follow(*place), stranger)):
            expected = searched(texts, text, order)
            right += next(steps, None) == expected
            found += 1
    return right, found


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_end_and_what_followed_it_equal_a_search(seed: int) -> None:
    """For texts that grow in turn, and for one that only reads where it goes on."""
    right, found = grown(seed, SuffixAutomaton())
    assert right == found


@pytest.mark.parametrize("fault", ["_exact", "MOST_CONTEXTS"])
def test_control_undivided_states_and_few_counted_contexts_are_found_wrong(fault: str, monkeypatch) -> None:
    if fault == "_exact":
        monkeypatch.setattr(SuffixAutomaton, fault, lambda self, context, token, after: after)
    else:
        monkeypatch.setattr(suffix_automaton, fault, 2)
    results = [grown(seed, SuffixAutomaton()) for seed in range(8)]
    assert any(right < found for right, found in results)


def test_a_copy_goes_on_where_it_reaches_the_end_of_the_text() -> None:
    automaton = SuffixAutomaton()
    state = automaton.extend(0, [7, 4, 5, 4, 5])
    assert [step.token for step in islice(automaton.follow(state), 5)] == [4, 5, 4, 5, 4]
    assert not list(automaton.follow(automaton.extend(0, [1, 2, 3])))


@pytest.mark.parametrize("period", [1, 3, 50])
def test_texts_that_repeat_themselves_take_no_more_work(period: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state a token and the contexts that are counted; not all of a text's repetitions."""
    automaton, states = SuffixAutomaton(), []
    made = SuffixAutomaton._new
    monkeypatch.setattr(SuffixAutomaton, "_new", lambda self, *args: (states.append(1), made(self, *args))[1])
    state = automaton.extend(0, [place % period for place in range(3000)])
    assert len(states) <= 2 * 3000
    assert [step.token for step in islice(automaton.follow(state), 4)] == [(3000 + k) % period for k in range(4)]
