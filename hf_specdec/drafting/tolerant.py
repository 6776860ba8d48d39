"""`on_draft_error="continue"`: after a drafting error, the call continues without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_specdec.drafting.drafter import Drafter, DraftProposal, no_drafts
from hf_specdec.host.caller import warn_caller
from hf_specdec.models.hidden_states import HiddenStates
from hf_specdec.rules.round_statistics import Round


class TolerantDrafter:
    """Wrap a drafter. If it fails, warn once and draft nothing for the rest of the call.

    Args:
        drafter: the drafter to wrap.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter: Drafter | None = drafter

    @property
    def states(self) -> HiddenStates | None:
        """The hidden states that the drafter reads."""
        return None if self._drafter is None else self._drafter.states

    def propose(self, ids: Tensor, lengths: Sequence[int], room: Sequence[int]) -> DraftProposal:
        """The drafter's proposal; an empty one after it has failed."""
        try:
            if self._drafter is not None:
                return self._drafter.propose(ids, lengths, room)
        except Exception as error:  # a draft model can raise anything; KeyboardInterrupt is not caught
            self._drop(error)
        return no_drafts(ids)

    def retain(self, rows: Sequence[int]) -> None:
        """Draft for `rows` only from now on."""
        try:
            if self._drafter is not None:
                self._drafter.retain(rows)
        except Exception as error:
            self._drop(error)

    def observe(self, finished: Round) -> None:
        """Let the drafter learn from a finished round."""
        if self._drafter is not None:
            self._drafter.observe(finished)

    def for_prepared_rounds(self) -> None:
        """None, since an error in a prepared round may not be the draft's."""

    def runners(self) -> list[Any]:
        """The drafter's runners."""
        return [] if self._drafter is None else self._drafter.runners()

    def _drop(self, error: Exception) -> None:
        self._drafter = None
        warn_caller(f"on_draft_error='continue': the draft failed, so this call continues without drafts: {error!r}")
