"""Copies that are made wherever something matches, since tiny models' texts rarely repeat themselves."""

from __future__ import annotations

import pytest

from hf_specdec.lengths import chances
from hf_specdec.lengths.history import LengthHistory


def copy_wherever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copied token seem worth verifying, and the model seem to be wrong until it was right.

    Look-ups never rest: whether they do depends on how long they take.
    """
    monkeypatch.setattr(LengthHistory, "seconds", lambda self, copied, steps: 1.0)
    monkeypatch.setattr(LengthHistory, "pay_look_up", lambda self, saved: None)
    monkeypatch.setattr(chances, "PRIOR_ACCEPTANCE", 0.1)
