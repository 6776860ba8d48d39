"""Texts on an accelerator: the host decides about tokens, and the device holds the same when it is asked."""

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_specdec.host.transcript import Transcript

PAD, EOS = 0, 1
ROUNDS = ([[5, 6, 7], [5], [6, 7]], [[8], [EOS, 9], [9, 9, 9]], [[4, 4], [3], [2]], [[7, 7, 7, 7], [3], [8, 8]])


def _transcript(dtype: torch.dtype = torch.long) -> Transcript:
    criteria = StoppingCriteriaList([MaxLengthCriteria(10), EosTokenCriteria(EOS)])
    return Transcript(torch.full((3, 2), 3, dtype=dtype), criteria, PAD, spare=2)


@pytest.fixture(params=[torch.long, torch.int32], ids=str)
def apart(request, monkeypatch) -> Transcript:
    """A transcript whose device has memory of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "cpu", lambda tensor: tensor.clone())
        return _transcript(request.param)


@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (1, 3), (3,)])
def test_the_device_holds_the_host_s_texts_whenever_it_is_asked(apart: Transcript, asked: tuple[int, ...]) -> None:
    """Ends and padding included."""
    together = _transcript(apart.ids.dtype)
    for at, tokens in enumerate(ROUNDS):
        assert together.append(tokens) == apart.append(tokens)
        together.show()
        apart.show()
        if at in asked:
            assert torch.equal(apart.ids, together.ids)
            assert torch.equal(apart.sequences, together.sequences)
    assert together.finished and apart.finished


def test_drafts_behind_other_rows_stay_where_they_are(apart: Transcript) -> None:
    """What is sent are tokens, not the columns that they stand in."""
    apart.ids[1, 3:5] = 9
    apart.append([[5, 6, 7], [5], [6]])
    assert apart.ids[1].tolist()[2:5] == [5, 9, 9]


def test_scores_of_tokens_that_wait_for_another_row_hold_no_round() -> None:
    """Recorded scores take as much memory as the caller gets, not that of whole rounds."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(50)])
    transcript = Transcript(torch.ones(2, 3, dtype=torch.long), criteria, 0, keep_scores=True, keep_logits=True)
    for _ in range(3):
        counts = transcript.append([[5, 5, 5], [5]])
        round_of_both = torch.randn(2, 9, 40)
        for kind in ("scores", "logits"):
            transcript.record(kind, round_of_both, counts)
        transcript.show()
    waiting = [value for rows in transcript._rows.values() for row in rows for value in row]
    assert [len(row) for row in transcript._rows["scores"]] == [6, 0]
    assert all(value.untyped_storage().nbytes() <= 3 * 40 * 4 for value in waiting)
    assert transcript.scores is not None and len(transcript.scores) == 3
    assert all(column.untyped_storage().nbytes() == 2 * 40 * 4 for column in transcript.scores)
