"""Whisper's passes over an encoding, replayed or compiled: plain tokens, for every recording of a series."""

from typing import Any

import pytest
import torch
from helpers.families import pair
from helpers.identity import speculated
from helpers.models import noisy
from helpers.patches import interpret_compiled_steps, noted
from helpers.tiny_whisper import BEGIN, FRAMES, sharing, whisper
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_specdec.models import recorded_passes
from hf_specdec.models.cache_choice import supports_rows_cache
from hf_specdec.models.cache_names import cache_of
from hf_specdec.models.static_cache import EncodedLayer
from hf_specdec.prepared.compiled_step import CompiledStep
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_store import STORE, kept_engines

GREEDY = {"max_new_tokens": 20, "do_sample": False}
# Of the call; `return_timestamps` leaves a prompt of a single token.
CALLS: dict[str, dict[str, Any]] = {
    "drafts": {},
    "one-token prompts": {"return_timestamps": True},
    "no drafts": {"drafter": "none"},
    "no drafts, one-token prompts": {"drafter": "none", "return_timestamps": True},
    "copies": {"drafter": "hybrid"},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "static cache": {"cache_implementation": "static"},
}
# Those that plain `generate` takes.
OWN = ("return_timestamps", "output_scores", "return_dict_in_generate", "prompt_ids")


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """Passes are recorded at once; one entry for every replay."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    return noted(monkeypatch, recorded_passes, "replay", lambda *_: 1)


@pytest.fixture
def compiled(monkeypatch) -> list[int]:
    """Compiled steps are interpreted; one entry for each."""
    interpret_compiled_steps(monkeypatch)
    return noted(monkeypatch, CompiledStep, "compile", lambda *_: 1)


def sound(rows: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    features = torch.randn(rows, 8, FRAMES, dtype=torch.float64)
    return {"input_features": features, "attention_mask": torch.ones(rows, FRAMES, dtype=torch.long)}


def check(target: PreTrainedModel, draft: PreTrainedModel, rows: int, seed: int, settings: dict[str, Any]) -> Any:
    """A speculative call gives plain tokens; returns what it returned."""
    plain = target.generate(**sound(rows, seed), **GREEDY, **{name: settings[name] for name in OWN if name in settings})
    given = {} if settings.get("drafter") == "none" else {"assistant_model": draft}
    ours = speculated(target, None, **sound(rows, seed), **GREEDY, **given, **settings)
    asked, found = (out if isinstance(out, torch.Tensor) else out.sequences for out in (plain, ours))
    assert torch.equal(found, asked), (settings, rows, seed)
    return ours


def of_each_kind(test: Any) -> Any:
    """Run a test with drafts that have an encoding of their own, or the target's, in each of `CALLS`."""
    of_drafts = pytest.mark.parametrize("make", [noisy, sharing])
    return of_drafts(pytest.mark.parametrize("settings", CALLS.values(), ids=CALLS)(test))


@of_each_kind
def test_replayed_passes(make, settings: dict[str, Any], replays: list[int]) -> None:
    target = whisper()
    draft = make(target)
    for rows in (1, 3):
        for seed in range(2):
            replays.clear()
            check(target, draft, rows, seed, settings)
            assert replays


@of_each_kind
def test_compiled_passes(make, settings: dict[str, Any], compiled: list[int]) -> None:
    """A recording that is heard again after another compiles nothing."""
    target = whisper()
    draft = make(target)
    for rows in (1, 3):
        made = []
        for seed in (0, 1, 0, 1):
            compiled.clear()
            check(target, draft, rows, seed, {**settings, "compile": True})
            made.append(len(compiled))
        assert made[0] and not made[-1]


@pytest.mark.parametrize("kind", ["recorded", "compiled"])
def test_a_call_does_not_see_the_recording_of_an_earlier_one(kind: str, compiled, replays, monkeypatch) -> None:
    """The control of the tests above: where the encoding is not replaced, a later call says what the earlier heard."""
    target, settings = whisper(), {"compile": kind == "compiled"}
    draft = sharing(target)
    for seed in range(2):
        check(target, draft, 1, seed, settings)
    kept = EncodedLayer.update
    first: list[Any] = []

    def update(self, keys, values, *args, **kwargs):
        if not first:
            first.extend((keys, values))
        return kept(self, *first)

    monkeypatch.setattr(EncodedLayer, "update", update)
    with pytest.raises(AssertionError):
        for seed in range(2):
            check(target, draft, 1, seed, settings)


@pytest.mark.parametrize("make", [noisy, sharing])
@pytest.mark.parametrize("settings", [{}, {"drafter": "hybrid"}, {"drafter": "none"}], ids=["draft", "hybrid", "none"])
def test_rounds_are_compiled_as_a_whole_where_tokens_are_suppressed(
    make, settings: dict[str, Any], compiled: list[int], monkeypatch
) -> None:
    """Also where that is at the beginning of a text only; a call with a longer prompt compiles nothing."""
    rounds = noted(monkeypatch, Engine, "load", lambda *_: 1)
    target = whisper()
    draft = make(target)
    shown = target.generate(**sound(1, 0), **GREEDY)[0].tolist()
    suppressed = {"begin_suppress_tokens": shown[:1], "suppress_tokens": shown[3:5]}
    for name, tokens in suppressed.items():
        setattr(target.generation_config, name, tokens)
    made = []
    for prompt in ([], [5], [5, 6, 7], []):
        compiled.clear(), rounds.clear()
        given = {"prompt_ids": torch.tensor([BEGIN, *prompt])} if prompt else {}
        out = check(target, draft, 1, 0, {**settings, **given, "compile": True})
        made.append(len(compiled))
        assert rounds
    assert made[0] and not made[-1] and not made[-2], made
    assert out[0, 0] != shown[0] and not {*out[0].tolist()} & {*shown[3:5]}, "the control: the text is another"


def test_an_idle_engine_whose_memory_was_freed_reads_the_next_encoding(compiled: list[int]) -> None:
    target = whisper()
    draft = sharing(target)
    check(target, draft, 1, 0, {"compile": True})
    (engine,) = kept_engines(target, compile=True)
    before = engine.buffers.nbytes
    engine.buffers.drop_caches()
    assert engine.buffers.nbytes < before and not any(t.numel() for t in engine.target.cache.cross.layers[0].tensors())
    check(target, draft, 1, 1, {"compile": True})
    assert STORE.of(target, compile=True) == [engine]


def test_the_cache_is_the_one_that_plain_generate_returns(replays: list[int]) -> None:
    target = whisper()
    plain = cache_of(target.generate(**sound(3, 0), **GREEDY, return_dict_in_generate=True))
    ours = cache_of(check(target, sharing(target), 3, 0, {"return_dict_in_generate": True}))
    assert isinstance(ours, EncoderDecoderCache)
    for name in ("self_attention_cache", "cross_attention_cache"):
        for one, other in zip(getattr(ours, name).layers, getattr(plain, name).layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)


def test_padded_prompts_of_the_text_before(replays: list[int]) -> None:
    """Rows of long recordings condition on texts of different lengths, padded on the left."""
    target = whisper()
    torch.manual_seed(1)
    mask = torch.ones(3, 3 * FRAMES, dtype=torch.long)
    mask[1:, 2 * FRAMES :] = 0
    call = {
        "input_features": torch.randn(3, 8, 3 * FRAMES, dtype=torch.float64), "attention_mask": mask, **GREEDY,
        "return_timestamps": True, "condition_on_prev_tokens": True,
    }  # fmt: skip
    assert torch.equal(speculated(target, sharing(target), **call), target.generate(**call)) and replays


def test_which_models_with_encoders_have_such_passes() -> None:
    target = whisper()
    assert supports_rows_cache(target, {"encoder_outputs": BaseModelOutput(torch.zeros(1, FRAMES // 2, 32))})
    assert not supports_rows_cache(target, {"encoder_outputs": BaseModelOutput(torch.zeros(1, FRAMES, 32))})
    assert not supports_rows_cache(target, {})
    assert not supports_rows_cache(pair("bart")[0], {"encoder_outputs": BaseModelOutput(torch.zeros(1, 7, 32))})
