"""Copies that are made wherever something matches, since tiny models' texts rarely repeat themselves."""

from __future__ import annotations

import pytest

from hf_specdec.lengths import auto_length
from hf_specdec.lengths.auto_length import LengthHistory


def copy_wherever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copied token seem worth verifying, and the model seem to be wrong until it was right."""
    monkeypatch.setattr(LengthHistory, "seconds", lambda self, copied, steps: 1.0)
    monkeypatch.setattr(auto_length, "PRIOR_ACCEPTANCE", 0.1)
