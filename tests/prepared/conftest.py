"""Prepared rounds without a compiler or a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hf_specdec
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.prepared_decoder import PreparedDecoder


@pytest.fixture
def fast_rounds(monkeypatch) -> Iterator[list[PreparedDecoder]]:
    """Rounds run as on CUDA, but uncaptured; lists who ran them."""
    ran: list[PreparedDecoder] = []
    run_round = PreparedDecoder._round

    def listed(self: PreparedDecoder, *args):
        ran.append(self)
        return run_round(self, *args)

    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    monkeypatch.setattr(PreparedDecoder, "_round", listed)
    with hf_specdec.enable(generation_strategy="speculative"):
        yield ran
