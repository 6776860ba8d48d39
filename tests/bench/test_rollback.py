"""The task `rollback`: its result, its refusals, and that all timed ways lead to the same state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tables import rows_of

from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.reports.tables import rollback as tables
from hf_specdec.bench.running import rollback_passes, warming
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage.results import load
from hf_specdec.bench.tasks import rollback
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.recurrences import Recorder

HYBRID = "synthetic:tiny-falcon-h1:draft=64x1"
STATE = 6 * 128 * 16 * 4  # layers, width, numbers of each, bytes


def settings(name: str, folder: Path) -> Settings:
    return Settings(
        task="rollback", model_name=name, assisted_generation=True, num_assistant_tokens=3, prompt_lengths=(12,),
        max_new_tokens=6, output_dir=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> LoadedPair:
    return load_pair(Settings(model_name=HYBRID, assisted_generation=True))


def test_the_task_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SETTLED", 10.0)
    rollback.run_rollback(settings(HYBRID, tmp_path))
    (path,) = tmp_path.glob("*.json.gz")
    result = load(path)
    measured = result["rollback"]
    assert {name: len(times) for name, times in measured["seconds"].items()} == dict.fromkeys(
        rollback_passes.TIMED, rollback.REPEATS
    )
    assert (measured["lookahead"], measured["rejected"]) == (3, 1)
    assert (measured["bytes"]["steps"], measured["bytes"]["checkpoint"]) == (5 * STATE, 2 * STATE)
    assert 2 * STATE < measured["bytes"]["replay"] < 3 * STATE
    assert path.with_name(path.name.replace(".json.gz", ".md")).read_text().count("acceptance imposed)") > 1


def test_as_many_prompts_are_decoded_as_are_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SETTLED", 10.0)
    rollback.run_rollback(replace(settings(HYBRID, tmp_path), batch_sizes=(2,)))
    (path,) = tmp_path.glob("*.json.gz")
    assert {call.batch for call in load(path)["calls"]} == {2}


def test_a_target_with_attention_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--model_name: 'synthetic:tiny-llama' has no recurrent layers"):
        rollback.run_rollback(settings("synthetic:tiny-llama", tmp_path))


@pytest.mark.parametrize("stays", [1, 2, 3])
def test_replay_comes_to_the_state_that_was_picked(pair: LoadedPair, stays: int, monkeypatch) -> None:
    """And to another one where it reads a token more."""
    states: dict[str, list[torch.Tensor]] = {"replayed": [], "a token more": []}
    at_once, made = rollback_passes._AtOnce.replay, Recorder.__init__
    recorders: list[Recorder] = []

    def replay(self: Any, length: int) -> None:
        for name, tokens in (("replayed", stays), ("a token more", stays + 1)):
            states[name] = [many(**rollback_passes.cut(kind, given, 0, tokens))[1] for kind, many, given in self.given]
        at_once(self, length)

    def init(self: Recorder, *args: Any) -> None:
        made(self, *args)
        recorders.append(self)

    monkeypatch.setattr(rollback_passes._AtOnce, "replay", replay)
    monkeypatch.setattr(Recorder, "__init__", init)
    rollback_passes.rollback_times(pair, list(range(5, 17)), 3, 1)
    steps = next(recorder for recorder in recorders if type(recorder) is Recorder and len(recorder.states[0]) == 4)
    for name, equal in (("replayed", True), ("a token more", False)):
        for replayed, picked in zip(states[name], (kept[stays - 1] for kept in steps.states), strict=True):
            assert torch.allclose(replayed, picked, atol=1e-5) is equal


def test_passes_over_several_tokens_read_texts_of_one_length(pair: LoadedPair, monkeypatch) -> None:
    lengths: list[int] = []
    forward = pair.target.forward

    def listed(*ids: torch.Tensor, **call: Any) -> Any:
        out = forward(*ids, **call)
        lengths.append(next(layer for layer in call[CACHE_NAME].layers if hasattr(layer, "keys")).keys.shape[-2])
        return out

    def timed(loaded: LoadedPair, step: Any) -> tuple[Any, float]:
        pair.target.forward = listed
        try:
            return step(), 1.0
        finally:
            del pair.target.forward

    monkeypatch.setattr(rollback_passes, "timed", timed)
    rollback_passes.rollback_times(pair, tuple(range(3, 15)), 3, repeats=3)
    rounds = [lengths[start : start + 4] for start in range(0, len(lengths), 4)]
    single, verification, _, checkpoint = zip(*rounds, strict=True)
    read = 12 + 4  # the prompt, and the pass that replay repeats
    assert (set(single), set(verification), set(checkpoint)) == ({read + 1}, {read + 4}, {read + 3 + 4})


def test_each_way_is_predicted_from_its_own_passes(pair: LoadedPair, monkeypatch) -> None:
    """Times are made up: a step takes 1 s, drafts nothing, and all are accepted, so that a round brings 4 tokens."""
    seconds = {"single": 1, "verification": 1, "steps": 2, "picking": 0, "replay": 3, "checkpoint": 8}
    result = {
        "rollback": {
            "seconds": {name: [value] for name, value in seconds.items()},
            "bytes": {"steps": 3e6, "replay": 2e6, "checkpoint": 1e6},
            "lookahead": 3,
            "rejected": 1,
        },
        "methods": [
            {"name": "x", "kind": "speculative", "engine": "eager", "draft": None, "lookahead": 3, "same_engine": "y"}
        ],
        "calls": [],
        "passes": [],
    }
    monkeypatch.setattr(tables.rounds, "alpha", lambda calls: 1.0)
    monkeypatch.setattr(tables.passes, "costs_of", lambda *_: tables.passes.Costs({1: 0.0}, {1: 1.0}))
    rows = rows_of(tables.rollback_table(result))
    assert [(row[""], row["Kept (MB)"], row["Predicted speedup"]) for row in rows] == [
        ("Token by token", "3.0", "2.00"),
        ("Replay", "2.0", "1.00"),
        ("Checkpoint", "1.0", "0.50"),
    ]
