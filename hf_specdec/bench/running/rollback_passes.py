"""Times of three exact ways to take rejected drafts out of recurrent states, and the bytes that each keeps.

steps: the recurrence runs token by token over the drafts, and one of the states is picked (what the package does);
replay: it runs over all of them at once, and again from the old state over the accepted ones; checkpoint: it runs at
once, and the next pass reads the accepted tokens again together with its own drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.bare_passes import timed
from hf_specdec.models.cache_names import cache_argument
from hf_specdec.models.cache_rollback import new_cache
from hf_specdec.models.recurrences import Arguments, Recorder, Recurrence, cut, places, recording
from hf_specdec.models.recurrent_runner import RecurrentRunner
from hf_specdec.models.recurrent_states import recurrent_layers
from hf_specdec.models.traits import pass_mode

# In the order in which they are timed; `rollback_times` says what they are.
TIMED = ("single", "verification", "steps", "picking", "replay", "checkpoint")


class _AtOnce(Recorder):
    """Runs recurrences over all tokens at once, and keeps what they were given."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self.given: list[tuple[Recurrence, Callable[..., Any], Arguments]] = []

    def run(self, kind: Recurrence, many: Callable[..., Any], single: Callable[..., Any], given: Arguments) -> Any:
        """See `Recorder.run`."""
        # The cache writes the new state over the old one.
        old = {kind.state: given[kind.state].clone()} if kind.state is not None else {}
        self.given.append((kind, many, {**given, **old}))
        return many(**given)

    def replay(self, length: int) -> None:
        """Run the recurrences again over the first `length` tokens."""
        for kind, many, given in self.given:
            many(**cut(kind, given, 0, length))


def rollback_times(pair: LoadedPair, prompt: Sequence[int], lookahead: int, repeats: int) -> dict[str, Any]:
    """Times of the target behind a prompt, at batch size 1, where half of the drafts are rejected.

    Returns:
        `seconds`: lists of `repeats`, by the names of `TIMED`. "single" and "verification": passes over 1 and
        lookahead + 1 tokens, recurrences at once. "steps": the verification, recurrences token by token, and
        "picking": the rollback after it. "replay": recurrences over the tokens that stay. "checkpoint": a
        verification that reads these again. `bytes`: kept by way. `lookahead`, `rejected`: tokens.
    """
    model, rejected = pair.target, lookahead // 2
    stays, verified = lookahead + 1 - rejected, lookahead + 1
    ids = torch.tensor([prompt], device=model.device)
    more = ids.repeat(1, stays + verified)
    key, capacity = cache_argument(model), len(prompt) + (1 + repeats) * verified
    with pass_mode(model)():
        runner = RecurrentRunner(model, {key: _cache(model), "use_cache": True}, ids, capacity)
        runner.forward(ids, 1)
        plain = {key: _cache(model), "use_cache": True}
        model(ids, **plain)
        at_once = _AtOnce()
        with recording(at_once, places(model)):
            model(more[:, :verified], **plain)
        filled = plain[key]
        runs: dict[str, Callable[[], object]] = {
            "single": lambda: model(more[:, :1], **plain),
            "verification": lambda: model(more[:, :verified], **plain),
            "steps": lambda: runner.forward(more[:, :verified], verified),
            "picking": lambda: runner.rewind([runner.read[0] - rejected]),
            "replay": lambda: at_once.replay(stays),
            "checkpoint": lambda: model(more[:, : stays + verified], **plain),
        }
        rounds: list[dict[str, float]] = []
        for _ in range(1 + repeats):
            rounds.append({})
            for name in TIMED:
                # So that passes of the plain cache, which the runner's `picking` does not shorten, read one length.
                plain[key] = deepcopy(filled)
                rounds[-1][name] = timed(pair, runs[name])[1]
        rounds = rounds[1:]  # the first one warms up
    return {
        "seconds": {name: [times[name] for times in rounds] for name in TIMED},
        "bytes": _bytes_kept(plain[key], at_once, lookahead),
        "lookahead": lookahead,
        "rejected": rejected,
    }


def _cache(model: PreTrainedModel) -> Any:
    return new_cache(model, "model_name", cross_attention=False)


def _bytes_kept(cache: Any, at_once: _AtOnce, lookahead: int) -> dict[str, int]:
    """Of recurrent states, and of what replay has to keep beside them."""
    state = sum(held.nbytes for layer in recurrent_layers(cache) for held in layer.recurrent_states.values())
    inputs = [given[key] for kind, _, given in at_once.given for key in kind.axes]
    replayed = sum(held.nbytes for held in inputs if isinstance(held, Tensor))
    return {"steps": (lookahead + 2) * state, "replay": 2 * state + replayed, "checkpoint": 2 * state}
