"""Tokens excluded by index: the scores of transformers' own processors, which are not asked."""

import pytest
import torch
from helpers.patches import noted
from transformers import LogitsProcessor
from transformers.generation import logits_process as host

from hf_specdec.host import suppressed_tokens
from hf_specdec.host.suppressed_tokens import Suppression

LISTS = ([3], [0, 9, 9], [-1, 4, 10, 10_000], [])


def _processor(tokens: list[int], begin: int | None) -> LogitsProcessor:
    if begin is None:
        return host.SuppressTokensLogitsProcessor(tokens)
    return host.SuppressTokensAtBeginLogitsProcessor(tokens, begin)


@pytest.mark.parametrize("tokens", LISTS, ids=str)
@pytest.mark.parametrize("begin", [None, 4, 5])
def test_the_scores_are_transformers_own(tokens: list[int], begin: int | None, monkeypatch) -> None:
    torch.manual_seed(0)
    ids, scores = torch.zeros(3, 5, dtype=torch.long), torch.randn(3, 10)
    processor, before = _processor(tokens, begin), scores.clone()
    kind = type(processor)
    asked = processor(ids, scores)
    assert torch.equal(asked, scores) == (begin == 4 or not {*tokens} & {*range(10)}), "the control"
    calls = noted(monkeypatch, kind, "__call__")
    assert torch.equal(suppressed_tokens.apply(processor, ids, scores), asked)
    assert torch.equal(scores, before) and not calls


@pytest.mark.parametrize("tokens", LISTS, ids=str)
@pytest.mark.parametrize("begin", [None, 4, 5])
def test_constant_operations_give_the_same_scores_for_texts_of_several_lengths(
    tokens: list[int], begin: int | None
) -> None:
    torch.manual_seed(0)
    scores, lengths = torch.randn(3, 10), torch.tensor([3, 4, 5])
    processor = _processor(tokens, begin)
    asked = torch.cat([processor(torch.zeros(1, n), scores[i : i + 1]) for i, n in enumerate(lengths.tolist())])
    operations = Suppression(_processor(tokens, 3 if begin else None), 12, scores.device)
    asked_before = operations(lengths, scores)
    operations.take_over(processor)
    assert torch.equal(operations(lengths, scores), asked)
    assert torch.equal(asked_before, asked) == (begin is None or not {*tokens} & {*range(10)}), "the control"


def test_a_processor_of_the_caller_s_is_asked() -> None:
    class Own(host.SuppressTokensLogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores + 1

    assert suppressed_tokens.apply(Own([1]), torch.zeros(1, 1), torch.zeros(1, 4)).tolist() == [[1.0] * 4]
