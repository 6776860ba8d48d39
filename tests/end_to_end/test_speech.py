"""Whisper: batches, long recordings, chunks and transformers' pipeline give plain `generate`'s tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.identity import speculated
from helpers.pairwise import pairwise
from helpers.recurrent_families import noisy
from helpers.tiny_whisper import FRAMES, feature_extractor, sharing, tokenizer, whisper
from transformers import AutoModelForCausalLM, PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration, pipeline

import hf_specdec
from hf_specdec import last_speculation


def distilled(target: PreTrainedModel) -> PreTrainedModel:
    """A decoder of one layer, the target's first, that reads the target's encoding, as Distil-Whisper's does."""
    config = WhisperConfig(**{**target.config.to_dict(), "decoder_layers": 1})
    draft = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    missing = draft.load_state_dict(
        {name: weight for name, weight in target.state_dict().items() if name.startswith("model.decoder.")},
        strict=False,
    )
    assert not [name for name in missing.missing_keys if "decoder" in name]
    return draft


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return whisper()


DRAFTS = {"smaller Whisper": noisy, "distilled": distilled, "sharing the encoder": sharing}
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "one window": (FRAMES, {}),
    "long-form": (3 * FRAMES, {"return_timestamps": True}),
    "long-form, on its own text": (3 * FRAMES, {"return_timestamps": True, "condition_on_prev_tokens": True}),
    "long-form, temperatures": (
        3 * FRAMES,
        {"return_timestamps": True, "temperature": (0.0, 0.4), "logprob_threshold": -1e3},
    ),
}


def recorded(rows: int, frames: int) -> dict[str, Any]:
    """A greedy call with recordings, all but the first shorter by half a window."""
    torch.manual_seed(1)
    mask = torch.ones(rows, frames, dtype=torch.long)
    mask[1:, -FRAMES // 2 :] = 0
    features = torch.randn(rows, 8, frames, dtype=torch.float64)
    return {"input_features": features, "attention_mask": mask, "do_sample": False, "max_new_tokens": 20}


@pytest.mark.parametrize(("draft", "call", "rows"), pairwise(tuple(DRAFTS), tuple(CALLS), (1, 3)))
def test_recordings(target: PreTrainedModel, draft: str, call: str, rows: int) -> None:
    frames, settings = CALLS[call]
    given = {**recorded(rows, frames), **settings}
    plain = target.generate(**given)
    ours = speculated(target, DRAFTS[draft](target), **given)
    assert torch.equal(ours, plain)
    stats = last_speculation(target)
    assert stats is not None and stats.drafted > 0


@pytest.mark.parametrize("stored", [None, 6, 20])
def test_the_lookahead_is_not_the_one_that_whisper_fills_in(target: PreTrainedModel, stored: int | None) -> None:
    """Whisper passes on a configuration with all of transformers' defaults, 20 tokens and a confidence of 0.4."""
    given = {**recorded(1, FRAMES), "max_new_tokens": 40}
    plain = target.generate(**given)
    target.generation_config.num_assistant_tokens = stored
    try:
        # The target as its own draft, which is never sure: a confidence of 0.4 would end drafts after one token.
        assert torch.equal(speculated(target, target, **given), plain)
    finally:
        target.generation_config.num_assistant_tokens = None
    stats = last_speculation(target)
    assert stats is not None and max(one.draft_steps for one in stats.rounds) == (stored or 4)


def resized(target: PreTrainedModel, **sizes: int) -> PreTrainedModel:
    """An untrained Whisper of other sizes."""
    config = WhisperConfig(**{**target.config.to_dict(), **sizes})
    return WhisperForConditionalGeneration(config).to(torch.float64).eval()


UNREADABLE: dict[str, tuple[Callable[[PreTrainedModel], PreTrainedModel], str]] = {
    "more mel bins": (
        lambda target: resized(target, num_mel_bins=16),
        r"the shape \[1, 8, 40\] .*16 channels.*mel bins",
    ),
    "a shorter window": (lambda target: resized(target, max_source_positions=10), r"length 20, but found 40.*window"),
    "a longer window": (lambda target: resized(target, max_source_positions=40), r"length 80, but found 40.*window"),
    "a wider encoding": (lambda target: distilled(resized(target, d_model=48)), "48 numbers .* the target's have 32"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_draft_that_can_not_read_the_target_s_input_is_refused(target: PreTrainedModel, kind: str) -> None:
    make, message = UNREADABLE[kind]
    inputs = {"input_features": torch.randn(1, 8, FRAMES, dtype=torch.float64)}
    with pytest.raises(ValueError, match=rf"assistant_model=Whisper\w+ .*{message}"):
        speculated(
            target, make(target), **inputs, attention_mask=torch.ones(1, FRAMES, dtype=torch.long), max_new_tokens=4
        )


@pytest.mark.parametrize(("draft", "frames", "settings"), [
    ("smaller Whisper", FRAMES, {}),
    ("distilled", FRAMES, {"return_dict_in_generate": True}),
    ("distilled", 3 * FRAMES, {"return_timestamps": True, "return_segments": True}),
])  # fmt: skip
def test_the_times_of_words(draft: str, frames: int, settings: dict[str, Any]) -> None:
    """They come from the attention that each token, and the padding after a row's end, pays to the recording."""
    target, call = whisper(), {**recorded(3, frames), "return_token_timestamps": True, **settings}
    plain = target.generate(**call)
    assert len(plain["token_timestamps"].unique()) > 3
    ours = speculated(target, DRAFTS[draft](target), **call)
    assert last_speculation(target).accepted > 0
    for name in ("sequences", "token_timestamps"):
        assert torch.equal(ours[name], plain[name])
    assert [[part["token_timestamps"].tolist() for part in row] for row in ours.get("segments", ())] == [
        [part["token_timestamps"].tolist() for part in row] for row in plain.get("segments", ())
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"chunk_length_s": 2, "batch_size": 3}, {"return_timestamps": True}, {"return_timestamps": "word"}]
)
def test_the_pipeline_for_speech(target: PreTrainedModel, settings: dict[str, Any]) -> None:
    recognize = pipeline(
        "automatic-speech-recognition",
        model=target,
        tokenizer=tokenizer(),
        feature_extractor=feature_extractor(),
        dtype=torch.float64,
    )
    sound = np.random.default_rng(0).standard_normal(5000)
    arguments = {**settings, "generate_kwargs": {"max_new_tokens": 20, "do_sample": False, "num_beams": 1}}
    plain = recognize(sound.copy(), **arguments)
    assert plain["text"]
    with hf_specdec.enable(target, assistant_model=noisy(target), generation_strategy="speculative"):
        ours = recognize(sound.copy(), **arguments)
    assert ours == plain
    stats = last_speculation(target)
    assert stats is not None and stats.drafted > 0
