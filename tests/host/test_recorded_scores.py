"""Recorded scores take as much memory as the caller gets, not that of whole rounds."""

from __future__ import annotations

import torch
from transformers import StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from hf_specdec.host.transcript import Transcript


def test_scores_of_tokens_that_wait_for_another_row_hold_no_round() -> None:
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
