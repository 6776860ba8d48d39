"""Tokens excluded by index: the scores of transformers' own processors, which are not asked."""

import pytest
import torch
from helpers.patches import noted
from transformers.generation import logits_process as host

from hf_specdec.host import suppressed_tokens

LISTS = ([3], [0, 9, 9], [-1, 4, 10, 10_000], [])


@pytest.mark.parametrize("tokens", LISTS, ids=str)
@pytest.mark.parametrize("begin", [None, 4, 5])
def test_the_scores_are_transformers_own(tokens: list[int], begin: int | None, monkeypatch) -> None:
    torch.manual_seed(0)
    ids, scores = torch.zeros(3, 5, dtype=torch.long), torch.randn(3, 10)
    kind, about = (
        (host.SuppressTokensLogitsProcessor, ())
        if begin is None
        else (host.SuppressTokensAtBeginLogitsProcessor, (begin,))
    )
    processor, before = kind(tokens, *about), scores.clone()
    asked = processor(ids, scores)
    assert torch.equal(asked, scores) == (begin == 4 or not {*tokens} & {*range(10)}), "the control"
    calls = noted(monkeypatch, kind, "__call__")
    assert torch.equal(suppressed_tokens.apply(processor, ids, scores), asked)
    assert torch.equal(scores, before) and not calls


def test_a_processor_of_the_caller_s_is_asked() -> None:
    class Own(host.SuppressTokensLogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + 1

    assert suppressed_tokens.apply(Own([1]), torch.zeros(1, 1), torch.zeros(1, 4)).tolist() == [[1.0] * 4]
