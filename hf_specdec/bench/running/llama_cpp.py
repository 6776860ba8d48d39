"""Greedy decoding by llama.cpp, plain and with a draft; needs `llama-cpp-python`."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

# The dtype of keys and values, and the attention: llama.cpp's defaults, but float32 throughout for float32 weights,
# since its fused attention computes in float16.
_HALF = (llama_cpp.GGML_TYPE_F16, llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO)
_ATTENTION = {
    "f32": (llama_cpp.GGML_TYPE_F32, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED),
    "bf16": _HALF,
    "q8_0": _HALF,
    "gguf": _HALF,  # the user's file, unchanged
}
_CHUNK = 2048  # tokens per call of llama_decode, its default
_SPARE = 64  # positions beyond the last token, for drafts: one cache serves every lookahead

# Called with each row's new tokens whenever some are delivered.
Delivered = Callable[[list[list[int]]], None]

# Callbacks that C calls: Python must keep a reference.
_SILENCE = llama_cpp.llama_log_callback(lambda level, text, data: None)


class Rows:
    """A model loaded from a GGUF file, and a batch of rows with a cache each; freed with the last reference.

    `lengths` is the number of each row's tokens in the cache. Raises RuntimeError if llama.cpp fails.
    """

    def __init__(self, path: Path, weights: str, threads: int):
        llama_cpp.llama_log_set(_SILENCE, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if model is None:
            raise RuntimeError(f"llama.cpp cannot read {str(path)!r}")
        self._model, self._weights, self._threads = model, weights, threads
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(_CHUNK, 0, 1)
        self._context: Any = None
        self._context_held = ExitStack()
        held = ExitStack()
        held.callback(llama_cpp.llama_model_free, model)
        held.callback(llama_cpp.llama_batch_free, self._batch)
        held.push(self._context_held)
        weakref.finalize(self, held.close)
        self._room = (0, 0)
        self.lengths: list[int] = []

    def prepare(self, rows: int, positions: int) -> None:
        """Make empty caches for `rows` rows of at least `positions` positions, reusing existing ones if possible."""
        positions += _SPARE
        if self._room[0] != rows or self._room[1] < positions:
            self._context_held.close()
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_seq_max = rows * positions, rows
            params.n_threads = params.n_threads_batch = self._threads
            cache_type, params.flash_attn_type = _ATTENTION[self._weights]
            params.type_k = params.type_v = cache_type
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if self._context is None:
                raise RuntimeError(f"llama.cpp cannot make a cache of {rows} x {positions} positions")
            self._context_held.callback(llama_cpp.llama_free, self._context)
            self._room = (rows, positions)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        self.lengths = [0] * rows

    def keep(self, lengths: Sequence[int]) -> None:
        """Cut each row's cache to at most `lengths` tokens."""
        memory = llama_cpp.llama_get_memory(self._context)
        for row, length in enumerate(lengths):
            if length < self.lengths[row]:
                llama_cpp.llama_memory_seq_rm(memory, row, length, -1)
                self.lengths[row] = length

    def feed(self, tokens: Sequence[Sequence[int]], last_only: bool = False) -> list[list[int]]:
        """Append tokens to each row; return the likeliest token after each, or only after each row's last.

        Rows may be given different numbers of tokens; a row without tokens has no result.
        """
        found: list[list[int]] = [[] for _ in tokens]
        queue = [
            (row, token, self.lengths[row] + place, not last_only or place == len(fed) - 1)
            for row, fed in enumerate(tokens)
            for place, token in enumerate(fed)
        ]
        for start in range(0, len(queue), _CHUNK):
            chunk = queue[start : start + _CHUNK]
            self._decode(chunk)
            for index, (row, _, _, wanted) in enumerate(chunk):
                if wanted:
                    found[row].append(int(self.logits(index).argmax()))
        for row, fed in enumerate(tokens):
            self.lengths[row] += len(fed)
        return found

    def logits(self, index: int) -> np.ndarray[Any, Any]:
        """Logits `[V]` after the token at `index` in the last chunk of `feed`; valid until the next call."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,))

    def _decode(self, chunk: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(chunk)
        for index, (row, token, position, wanted) in enumerate(chunk):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = wanted
        if (status := llama_cpp.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status} for a batch of {len(chunk)} tokens")

    def propose(self, text: Sequence[Sequence[int]], room: Sequence[int]) -> list[list[int]]:
        """Draft up to `room` tokens after each row's text, after reading its unread part."""
        drafts: list[list[int]] = [[] for _ in text]
        fed = [list(row[self.lengths[place] :]) if room[place] > 0 else [] for place, row in enumerate(text)]
        while any(fed):
            latest = self.feed(fed, last_only=True)
            for drafted, found in zip(drafts, latest, strict=True):
                drafted += found
            fed = [found if len(drafts[place]) < room[place] else [] for place, found in enumerate(latest)]
        return drafts


class Copies:
    """llama-cpp-python's drafter without a model: copies what followed the last two tokens, or the last, before."""

    def prepare(self, rows: int, positions: int) -> None:
        """Nothing is kept."""

    def keep(self, lengths: Sequence[int]) -> None:
        """Nothing is kept."""

    def propose(self, text: Sequence[Sequence[int]], room: Sequence[int]) -> list[list[int]]:
        """Draft up to `room` tokens after each row's text."""
        return [self.after(row, most) for row, most in zip(text, room, strict=True)]

    @staticmethod
    def after(text: Sequence[int], most: int) -> list[int]:
        """Copy up to `most` tokens."""
        ids = np.array(text, np.intc)
        return [] if most < 1 else LlamaPromptLookupDecoding.find_candidate_pred_tokens(ids, 2, most).tolist()


@dataclass
class Decoded:
    """The new tokens of each row, and a list of counts per round (one entry per row, 0 for a finished row)."""

    tokens: list[list[int]]
    drafted: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list)


def decode(
    target: Rows, prompts: Sequence[Sequence[int]], new_tokens: int, delivered: Delivered = lambda tokens: None
) -> Decoded:
    """Decode `new_tokens` tokens per row greedily."""
    target.prepare(len(prompts), max(map(len, prompts)) + new_tokens)
    text: list[list[int]] = [[] for _ in prompts]
    latest = target.feed(prompts, last_only=True)
    while True:
        for row, found in zip(text, latest, strict=True):
            row += found
        delivered(latest)
        if len(text[0]) == new_tokens:
            return Decoded(text)
        latest = target.feed(latest)


def decode_with_draft(
    target: Rows,
    draft: Rows | Copies,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    lookahead: int,
    delivered: Delivered = lambda tokens: None,
) -> Decoded:
    """Decode the same tokens, drafting up to `lookahead` per round, but no more than are left to decode."""
    models: tuple[Rows | Copies, ...] = (target, draft)
    for model in models:
        model.prepare(len(prompts), max(map(len, prompts)) + new_tokens)
    target.feed([prompt[:-1] for prompt in prompts], last_only=True)
    text = [list(prompt) for prompt in prompts]
    goals = [len(prompt) + new_tokens for prompt in prompts]
    done = Decoded([])
    while any(len(row) < goal for row, goal in zip(text, goals, strict=True)):
        room = [min(lookahead, goal - len(row) - 1) for row, goal in zip(text, goals, strict=True)]
        drafts = draft.propose(text, room)
        # A finished row has room -1 and is not fed.
        answers = target.feed(
            [[row[-1], *drafted] if most >= 0 else [] for row, drafted, most in zip(text, drafts, room, strict=True)]
        )
        accepted = [_agreeing(drafted, answer) for drafted, answer in zip(drafts, answers, strict=True)]
        new = [answer[: count + 1] for answer, count in zip(answers, accepted, strict=True)]
        for row, found in zip(text, new, strict=True):
            row += found
        for model in models:
            model.keep([len(row) - 1 for row in text])
        done.drafted.append([len(drafted) for drafted in drafts])
        done.accepted.append(accepted)
        done.new_tokens.append([len(found) for found in new])
        delivered(new)
    done.tokens = [row[len(prompt) :] for row, prompt in zip(text, prompts, strict=True)]
    return done


def _agreeing(drafted: Sequence[int], answer: Sequence[int]) -> int:
    """The number of drafted tokens before the first that differs from the target's."""
    pairs = zip(drafted, answer, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(drafted))
