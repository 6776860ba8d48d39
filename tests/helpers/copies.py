"""Copies that are made wherever something matches, since tiny models' texts rarely repeat themselves."""

from __future__ import annotations

import pytest

from hf_specdec.drafting import hybrid
from hf_specdec.lengths import copy_chances


def copy_wherever_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every copied token seem worth verifying, and a hybrid's model seem to be wrong until it was right."""
    monkeypatch.setattr(copy_chances, "WORTH", 0.0)
    monkeypatch.setattr(hybrid, "PRIOR_ACCEPTANCE", 0.1)
