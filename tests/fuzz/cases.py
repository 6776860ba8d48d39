"""Random calls of `generate`: models, prompts, settings, processors, criteria and ends of text."""

import copy
import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from helpers.families import EAGER, FAMILIES, PAD, ROWS_FAMILIES, VOCABULARY, pair
from helpers.models import resized
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

CASES = int(os.environ.get("HF_SPECDEC_FUZZ_CASES", "0"))
ENCODER_DECODER = ("t5", "mt5", "bart")
SHORT_CONTEXT = 24
# Settings at which lossy strategies lose nothing. The ensemble is left out: NaN in a draft's scores would spread.
LOSSLESS_LIMITS = {
    "bild": {"rollback_threshold": 0.0},
    "lenient": {"lenience": 1.0},
    "typical": {"posterior_threshold": float("inf")},
}
VOCABULARIES = {"noisy": VOCABULARY, "smaller": VOCABULARY - 9, "larger": VOCABULARY + 9}


class ByLength(LogitsProcessor):
    """A processor of the caller's own: prefers one token, which depends on the text, in place."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores[torch.arange(len(ids), device=ids.device), (ids.sum(dim=1) + ids.shape[1]) % 31] += 2.5
        return scores


class BadScores(LogitsProcessor):
    """Gives the token of an odd text length a value that is no number."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return (
            scores.index_fill(1, torch.tensor([7], device=ids.device), self.value) if ids.shape[1] % 5 == 0 else scores
        )


class StopsAt(StoppingCriteria):
    """Ends a row once the sum of its tokens is divisible by a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return ids.sum(dim=1) % self.number == 0


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.7},
    "n-grams": {"no_repeat_ngram_size": 2},
    "shortest": {"min_new_tokens": 5},
    "suppressed": {"suppress_tokens": [3, 9, 11], "begin_suppress_tokens": [4, 5]},
    "bad words": {"bad_words_ids": [[6], [7, 8]]},
    "own": {"logits_processor": [ByLength()]},
    "nan": {"logits_processor": [BadScores(float("nan"))]},
    "inf": {"logits_processor": [BadScores(float("inf"))]},
    "-inf": {"logits_processor": [BadScores(-float("inf"))]},
    "temperature": {"logits_processor": [TemperatureLogitsWarper(1.6)]},
    "top-k": {"logits_processor": [TopKLogitsWarper(5)]},
    "min-p": {"logits_processor": [MinPLogitsWarper(0.2)]},
    "constraint": {"prefix_allowed_tokens_fn": lambda row, ids: [t for t in range(3, 40) if t % 3 != int(ids[-1]) % 3]},
}
PREPARABLE = ["none", "none", "none", "temperature", "top-k", "min-p"]
# What captured rounds would capture is just called. What inductor would compile is interpreted, save for some cases of
# `make fuzz`.
ENGINES = ["general", "captured", "interpreted", "interpreted"]


@dataclass(frozen=True)
class Case:
    """Calls of plain `generate` that differ in their prompts, and what makes them speculate."""

    family: str
    draft: str
    short_context: bool
    inputs: list[dict[str, list[list[int]]]]
    new_tokens: int
    call: dict[str, Any]
    processor: str
    stop_at: int | None
    end_at: int | None
    pad_is_eos: bool
    streams: bool
    engine: str
    default_dtype: str
    default_device: str | None
    other_tokenizer: bool
    speculation: dict[str, Any]


@functools.cache
def models(family: str, draft: str, short_context: bool, compiled: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and its draft; cases share them, so that each meets what others have left behind.

    Compiled rounds have models of their own, as interpreted ones leave theirs an engine under the same key.
    """
    target, noisy = pair(family) if draft == "noisy" else models(family, "noisy", short_context, compiled)
    if short_context and draft == "noisy":
        for model in (target, noisy):
            config = model.config
            name = "n_positions" if family == "gpt2" else "max_position_embeddings"
            setattr(config, name, SHORT_CONTEXT)
            if family == "gpt2":
                model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:SHORT_CONTEXT])
    for model in (target, noisy):
        model.generation_config.eos_token_id = None
    return target, noisy if draft == "noisy" else resized(copy.deepcopy(noisy), VOCABULARIES[draft]).to(noisy.dtype)


@st.composite
def cases(draw: st.DrawFn, engine: str) -> Case:
    """Any call that plain `generate` takes, in float64 and greedy; every other one such that rounds can be prepared."""
    prepared = draw(st.booleans())
    compiled = prepared and engine == "interpreted" and bool(CASES) and draw(st.integers(0, 9)) == 7
    # Few settings, so that little is compiled, and each of it serves many calls.
    engine = "compiled" if compiled else engine
    families = ["llama", "gpt-neox"] if compiled else ROWS_FAMILIES if prepared else sorted(FAMILIES)
    family = draw(st.sampled_from(families))
    encodes = family in ENCODER_DECODER
    # Padding turns eager softmax to NaN in float64, see `EAGER`.
    most = 1 if family in EAGER else 2 if compiled else 4
    rows = draw(st.integers(1, most))
    if not prepared and draw(st.integers(0, 12)) == 0:
        rows = 0
    short_context = family in ("gpt2", "llama") and not compiled and draw(st.booleans())
    length = draw(st.integers(2 if prepared else 1, 12))
    new_tokens = draw(st.integers(1, 14))
    if short_context and draw(st.booleans()):
        length = SHORT_CONTEXT - new_tokens
    drafts = ["noisy", "noisy", "smaller", "larger"] if family in ("llama", "qwen2") and not compiled else ["noisy"]
    default_device = None if prepared else draw(st.sampled_from([None] * 7 + ["meta"]))
    speculation = draw(speculations(prepared))
    if engine in ("interpreted", "compiled"):
        speculation["compile"] = True
    if compiled:
        speculation |= {"num_assistant_tokens": 2, "drafter": "model"}
        speculation.pop("entropy_threshold", None)
    return Case(
        family=family,
        draft=draw(st.sampled_from(drafts)),
        short_context=short_context,
        # The second call finds what the first has left.
        inputs=[draw(prompts(family, rows, length, prepared)) for _ in range(1 + prepared)],
        new_tokens=new_tokens,
        call=draw(calls(encodes, length, new_tokens, prepared)),
        processor="none" if compiled else draw(st.sampled_from(PREPARABLE if prepared else sorted(PROCESSORS))),
        stop_at=draw(st.sampled_from([None, None, 3, 7])),
        end_at=None if compiled else draw(st.one_of(st.none(), st.integers(0, new_tokens - 1))),
        pad_is_eos=draw(st.booleans()),
        streams=draw(st.booleans()),
        engine=engine,
        default_dtype=draw(st.sampled_from(["float32", "float32", "float64", "bfloat16"])),
        default_device=default_device,
        other_tokenizer=not prepared and draw(st.integers(0, 7)) == 5,
        speculation=speculation,
    )


@st.composite
def prompts(draw: st.DrawFn, family: str, rows: int, length: int, prepared: bool) -> dict[str, list[list[int]]]:
    """`input_ids` and `attention_mask`, padded on the side of the family."""
    encodes = family in ENCODER_DECODER
    token = st.integers(3, VOCABULARY - 1)
    ids = draw(st.lists(st.lists(token, min_size=length, max_size=length), min_size=rows, max_size=rows))
    if draw(st.booleans()):  # something to look up
        ids = [[row[i % 3] for i in range(length)] for row in ids]
    padding = [0] * rows if family in EAGER else [draw(st.integers(0, length - 1)) for _ in range(rows)]
    if rows > 1 and not encodes and not prepared and draw(st.integers(0, 9)) == 0:
        padding[-1] = length
    masks = [[0] * n + [1] * (length - n) for n in padding]
    if encodes:
        masks = [row[::-1] for row in masks]
    ids = [[t if seen else PAD for t, seen in zip(*row, strict=True)] for row in zip(ids, masks, strict=True)]
    return {"input_ids": ids, "attention_mask": masks}


@st.composite
def speculations(draw: st.DrawFn, prepared: bool) -> dict[str, Any]:
    """The package's own arguments."""
    strategy = draw(st.sampled_from(["speculative", "speculative", *LOSSLESS_LIMITS]))
    speculation = {
        "generation_strategy": strategy,
        "num_assistant_tokens": draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13, "auto", None])),
        "drafter": draw(st.sampled_from(["model"] * 3 + ["suffix", "hybrid", "auto", "none"])),
        "on_draft_error": "raise" if prepared else draw(st.sampled_from(["raise", "continue"])),
    }
    speculation |= LOSSLESS_LIMITS.get(strategy, {})
    if strategy == "bild":
        speculation["fallback_threshold"] = draw(st.sampled_from([0.0, 0.3, 0.6, 1.0]))
    if draw(st.integers(0, 3)) == 0:
        speculation["entropy_threshold"] = draw(st.sampled_from([0.0, 0.4, 1.0]))
    return {name: value for name, value in speculation.items() if value is not None}


@st.composite
def calls(draw: st.DrawFn, encodes: bool, length: int, new_tokens: int, prepared: bool) -> dict[str, Any]:
    """Arguments of plain `generate`."""
    call: dict[str, Any] = {"max_new_tokens": new_tokens}
    if draw(st.integers(0, 3)) == 0:
        call = {"max_length": new_tokens + (1 if encodes else length)}
    if prepared:
        return call | {"cache_implementation": "static", "return_dict_in_generate": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        call["use_cache"] = False
    elif not encodes:
        call["cache_implementation"] = draw(st.sampled_from([None, None, "static"]))
    call["return_dict_in_generate"] = call["output_scores"] = draw(st.booleans())
    return call
