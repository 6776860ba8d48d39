"""Calls in several threads and calls within calls: each output is the one that it gives alone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.streamer import Streamer
from transformers import GenerationMixin

import hf_specdec
from hf_specdec import SpeculativeDecoding

CALLS: list[dict[str, Any]] = [
    {"generation_strategy": "speculative", "num_assistant_tokens": 3},
    {"generation_strategy": "speculative", "num_assistant_tokens": "auto"},
    {"generation_strategy": "speculative", "drafter": "suffix"},
    {"generation_strategy": "speculative", "drafter": "hybrid", "num_assistant_tokens": 5},
    {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.3},
    {"generation_strategy": "speculative", "cache_implementation": "static"},
    {"generation_strategy": "speculative", "repetition_penalty": 1.3},
    {"generation_strategy": "speculative", "drafter": "none"},
]
SETTINGS = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}


def plain(target: Any, call: dict[str, Any], **inputs: Any) -> torch.Tensor:
    """What a call decodes without speculation."""
    repetition = {name: value for name, value in call.items() if name == "repetition_penalty"}
    return target.generate(**inputs, **SETTINGS, **repetition).sequences


def test_eight_threads_call_one_model_with_different_drafts_and_settings() -> None:
    target, draft = pair("llama")
    other = pair("llama", noise=0.6)[1]
    jobs = [(call, prompts(rows, seed=seed)) for seed, call in enumerate(CALLS) for rows in (1, 3)]
    expected = [plain(target, call, **inputs) for call, inputs in jobs]
    with hf_specdec.enable(target), ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(target.generate, **inputs, **SETTINGS, **call, assistant_model=(draft, other)[at % 2])
            for at, (call, inputs) in enumerate(jobs)
        ]
        outputs = [job.result() for job in running]
    for output, sequences, (_, inputs) in zip(outputs, expected, jobs, strict=True):
        assert torch.equal(output.sequences, sequences)
        assert output.speculation.new_tokens == len(inputs["input_ids"]) * SETTINGS["max_new_tokens"]


def test_threads_share_one_decoding_without_mixing_statistics() -> None:
    target, draft = pair("llama")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3)
    lengths = [5, 9, 14, 20, 26, 33, 38, 44]
    with ThreadPoolExecutor(8) as pool:
        settings = {name: value for name, value in SETTINGS.items() if name != "max_new_tokens"}
        running = [
            pool.submit(target.generate, **prompts(1), **settings, max_new_tokens=n, custom_generate=decoding)
            for n in lengths
        ]
        assert [job.result().speculation.new_tokens for job in running] == lengths


def test_generate_within_a_streamer() -> None:
    target, draft = pair("llama")
    expected, outer_expected = (plain(target, {}, **prompts(1, seed=seed)) for seed in (1, 2))
    inner: list[torch.Tensor] = []

    class Nested(Streamer):
        def put(self, value: torch.Tensor) -> None:
            inner.append(target.generate(**prompts(1, seed=1), **SETTINGS, **CALLS[len(inner) % 2]).sequences)

    with hf_specdec.enable(target, assistant_model=draft):
        outer = target.generate(**prompts(1, seed=2), **SETTINGS, **CALLS[0], streamer=Nested())
    assert torch.equal(outer.sequences, outer_expected) and len(inner) > 5
    assert all(torch.equal(sequences, expected) for sequences in inner)


@pytest.mark.parametrize("enabled_inside", [False, True])
def test_enable_and_disable_in_the_middle_of_another_call(enabled_inside: bool) -> None:
    target, draft = pair("llama")
    untouched = GenerationMixin.generate
    expected = plain(target, {}, **prompts(1))
    inside, changed = threading.Event(), threading.Event()

    class Waits(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.calls) == 4:
                inside.set()
                assert changed.wait(600)

    handle = hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(target.generate, **prompts(1), **SETTINGS, streamer=Waits())
        assert inside.wait(600)
        if enabled_inside:
            with hf_specdec.enable(target, generation_strategy="bild", rollback_threshold=0.0):
                changed.set()
                assert torch.equal(running.result().sequences, expected)
            hf_specdec.disable(target)
        else:
            handle.__exit__(None, None, None)
            changed.set()
        output = running.result()
    assert torch.equal(output.sequences, expected) and output.speculation.strategy == "speculative"
    assert GenerationMixin.generate is untouched
