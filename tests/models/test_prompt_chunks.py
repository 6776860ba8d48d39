"""`prefill_chunk_size`: target and draft read a long prompt in chunks, and the tokens are plain `generate`'s."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import recurrent_families
from helpers.families import exact_dtype, pair, prompts
from helpers.identity import speculated
from helpers.patches import noted
from transformers import DynamicCache, PreTrainedModel

import hf_specdec
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.dynamic_runner import in_chunks
from hf_specdec.models.static_runner import StaticRunner

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
LOOKAHEAD = 3


class Widths:
    """How many tokens each pass of a model reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seen: list[int] = []
        name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        model.register_forward_pre_hook(
            lambda model, args, kwargs: self.seen.append(kwargs[name].shape[1]), with_kwargs=True
        )


@pytest.mark.parametrize(("width", "count", "size", "pieces"), [
    (11, 1, None, [11]), (11, 1, 4, [4, 4, 3]), (12, 1, 4, [4, 4, 4]), (15, 4, 4, [4, 4, 7]), (4, 4, 1, [4]),
    (3, 1, 4, [3]), (9, 1, 100, [9]),
])  # fmt: skip
def test_chunks_of_transformers_with_the_drafts_in_the_last(
    width: int, count: int, size: int | None, pieces: list[int]
) -> None:
    tokens = torch.arange(width).unsqueeze(0)
    made = in_chunks(tokens, count, size)
    assert [piece.shape[1] for piece in made] == pieces and torch.equal(torch.cat(list(made), dim=1), tokens)


ENGINES: dict[str, dict[str, Any]] = {"dynamic": {}, "static": {"cache_implementation": "static"}}


@pytest.mark.parametrize(
    ("family", "engine", "rows"),
    [("llama", "dynamic", 1), ("llama", "static", 3), ("mistral-sliding", "dynamic", 3), ("bloom", "dynamic", 3)],
)
def test_no_pass_reads_more_of_a_prompt(family: str, engine: str, rows: int) -> None:
    target, draft = pair(family, dtype=exact_dtype(family, rows))
    call = {**prompts(rows, length=31), **GREEDY}
    plain = target.generate(**call)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**call)  # tries the passes of a model that does not say what they are like
        widths = [Widths(model) for model in (target, draft)]
        for size in (1, 4, 16, 100):
            settings = {"num_assistant_tokens": LOOKAHEAD, "prefill_chunk_size": size, **ENGINES[engine]}
            assert torch.equal(target.generate(**call, **settings), plain)
            for of_model in widths:
                assert max(of_model.seen) <= min(size, 31) + LOOKAHEAD
                assert (of_model.seen[: 31 // size] == [size] * (31 // size)) or size in (1, 100)
                of_model.seen.clear()


def test_prompts_of_prepared_rounds(fast_rounds, monkeypatch) -> None:
    target, draft = pair("llama")
    passes = noted(monkeypatch, StaticRunner, "_pass", lambda self, tokens, count: (self.model, tokens.shape[1]))
    call = {**prompts(2, length=31), **GREEDY, "assistant_model": draft}
    settings: dict[str, Any] = {"prefill_chunk_size": 8, "cache_implementation": "static"}
    ours = target.generate(**call, **settings)
    assert torch.equal(ours, target.generate(**call | {"assistant_model": None}, generation_strategy=None))
    assert fast_rounds
    assert [[width for model, width in passes if model is one] for one in (target, draft)] == [
        [8, 8, 8, 6],
        [8, 8, 8, 5],
    ]


def _row_by_row() -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Any]]:
    target, draft = pair("bart")
    return target, draft, {**prompts(2), "decoder_input_ids": torch.randint(3, 48, (2, 9))}


def _recurrent() -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Any]]:
    target = recurrent_families.model("FalconH1")
    return target, recurrent_families.noisy(target), {"input_ids": torch.randint(3, 40, (2, 21))}


def _with_cached_text() -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Any]]:
    target, draft = pair("llama")
    ids, cache = prompts(1, length=31)["input_ids"], DynamicCache(config=target.config)
    target(ids[:, :7], **{CACHE_NAME: cache}, use_cache=True)
    return target, draft, {"input_ids": ids, CACHE_NAME: cache}


@pytest.mark.parametrize("make", [_row_by_row, _recurrent, _with_cached_text], ids=lambda make: make.__name__)
def test_other_runners(make: Callable[[], tuple[PreTrainedModel, PreTrainedModel, dict[str, Any]]]) -> None:
    torch.manual_seed(3)
    target, draft, inputs = make()
    plain = target.generate(**{**inputs, CACHE_NAME: None}, **GREEDY)
    widths = Widths(target)
    ours = speculated(target, draft, **inputs, **GREEDY, prefill_chunk_size=4, num_assistant_tokens=LOOKAHEAD)
    assert torch.equal(ours, plain)
    assert widths.seen[:2] == [4, 4] and max(widths.seen) <= 4 + LOOKAHEAD


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_what_is_no_size(size: Any, pair) -> None:
    with pytest.raises(ValueError, match=f"prefill_chunk_size={size!r} must be an integer of at least 1"):
        speculated(pair[0], pair[1], torch.tensor([[5, 6]]), max_new_tokens=4, prefill_chunk_size=size)


def test_chunks_without_a_cache_are_refused_as_by_plain_generate(pair) -> None:
    call = {"max_new_tokens": 4, "prefill_chunk_size": 2, "use_cache": False}
    for strategy in (None, "speculative"):
        with (
            hf_specdec.enable(pair[0], assistant_model=pair[1], generation_strategy=strategy),
            pytest.raises(ValueError, match="without a cache"),
        ):
            pair[0].generate(torch.tensor([[5, 6]]), **call)
