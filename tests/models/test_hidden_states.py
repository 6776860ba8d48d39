"""`HiddenStates` against a record of what each pass left where."""

import random

import pytest
import torch

from hf_specdec.models.hidden_states import MOST_PASSES, HiddenStates


@pytest.mark.parametrize("drops", [False, True])
def test_the_last_pass_over_a_place_counts(drops: bool) -> None:
    numbers, rows = random.Random(0), 3
    for _ in range(20):
        states, texts = HiddenStates([-1]), [numbers.randrange(4)] * rows
        left: list[dict[int, float]] = [{} for _ in range(rows)]
        forgotten = list(texts)
        for made in range(2 * MOST_PASSES):
            width = numbers.randint(1, 5)
            values = torch.rand(rows, width, 2)
            states.add([place + width for place in texts], values)
            assert states.first == forgotten or drops or made
            for row, place in enumerate(texts):
                left[row] |= {place + lane: float(values[row, lane, 1]) for lane in range(width)}
            texts = [place + numbers.randint(0, width) for place in texts]
            if drops and numbers.random() < 0.3:
                forgotten = [numbers.randint(old, new) for old, new in zip(forgotten, texts, strict=True)]
                states.drop(forgotten)
        wanted = max(new - old for old, new in zip(forgotten, texts, strict=True))
        if wanted:
            found = states.of(forgotten, wanted)[..., 1]
            for row, first in enumerate(forgotten):
                known = [left[row][place] for place in range(first, texts[row])]
                assert torch.equal(found[row, : len(known)], torch.tensor(known))


def test_what_is_dropped_takes_no_memory() -> None:
    states = HiddenStates([-1])
    states.add([100, 100], torch.rand(2, 100, 4))
    states.drop([97, 100])
    assert sum(kept.shape[1] for _, kept in states._passes) == 3
    states.drop([100, 100])
    assert not states._passes
