"""`SuffixMemory`: earlier answers to copy drafts from, on request."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_specdec.drafting.suffix_automaton import SuffixAutomaton
from hf_specdec.models.traits import vocabulary_size

# Prompt tokens to keep before an answer, so that its beginning is found too.
TOKENS_BEFORE = 8
_FORMAT = "hf_specdec.SuffixMemory 1"


class SuffixMemory:
    """Answers of earlier calls, for `suffix_memory=` of `enable`, `generate` and `SpeculativeDecoding`.

    Calls with `drafter="suffix"` or `"hybrid"` copy from it; every call that is given it adds its answers when it ends,
    each with the last few tokens of its prompt. The output stays the target's, but the speed reveals whether a similar
    answer was given before: share a memory only among users who may know each other's answers.

    A memory serves one model, identified by name, vocabulary size and special tokens, since tokens differ between
    tokenizers. It may be used from several threads.

    Args:
        max_tokens: the most tokens that it holds, at about half a kilobyte each. When it is full, the older half is
            dropped.

    Raises:
        ValueError: `max_tokens` is not at least 2.
    """

    def __init__(self, max_tokens: int = 65_536) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 2:
            raise ValueError(f"max_tokens={max_tokens!r} must be an integer of at least 2.")
        self.max_tokens = max_tokens
        self._lock = threading.Lock()
        self._forget()

    def __len__(self) -> int:
        """The number of tokens that it holds."""
        with self._lock:
            return sum(map(len, self._texts()))

    def clear(self) -> None:
        """Forget all answers and their model. Running calls copy from them until they end."""
        with self._lock:
            self._forget()

    def automata(self, model: PreTrainedModel) -> tuple[SuffixAutomaton, ...]:
        """The automata in which a model's call looks up copies. They may be read while other calls add to the memory.

        Raises:
            ValueError: it holds answers of another model.
        """
        with self._lock:
            self._bind(model)
            return tuple(automaton for automaton, texts in (self._young, self._old) if texts)

    def add(self, model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> None:
        """Add a model's answers; of an answer longer than half of `max_tokens`, only the end.

        Raises:
            ValueError: it holds answers of another model.
        """
        with self._lock:
            self._bind(model)
            for text in texts:
                self._add(list(text)[-(self.max_tokens // 2) :])

    def save(self, path: str | PathLike[str]) -> None:
        """Write the answers to a JSON file, as token ids, not encrypted."""
        with self._lock:
            saved = {"format": _FORMAT, "max_tokens": self.max_tokens, "model": self._model, "texts": self._texts()}
        Path(path).write_text(json.dumps(saved), encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SuffixMemory:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is something else.
        """
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            if saved["format"] != _FORMAT or any(type(token) is not int for text in saved["texts"] for token in text):
                raise ValueError("not the format, or not token ids")
            memory = cls(saved["max_tokens"])
            for text in saved["texts"]:
                memory._add(text)
            memory._model = saved["model"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} was not written by SuffixMemory.save, or was changed.") from error
        return memory

    def _forget(self) -> None:
        self._model: list[Any] | None = None
        # The newer answers, and the older ones, which are dropped first.
        self._young: tuple[SuffixAutomaton, list[list[int]]] = (SuffixAutomaton(), [])
        self._old: tuple[SuffixAutomaton, list[list[int]]] = (SuffixAutomaton(), [])

    def _bind(self, model: PreTrainedModel) -> None:
        config = model.generation_config
        special = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        wanted = [model.config.name_or_path or type(model).__name__, vocabulary_size(model), *special]
        if self._model not in (None, wanted):
            raise ValueError(
                f"suffix_memory holds answers of another model, {self._model}, than this one, {wanted} (name, "
                "vocabulary size, special tokens): use a memory for each, or call its clear()."
            )
        self._model = wanted

    def _texts(self) -> list[list[int]]:
        return self._old[1] + self._young[1]

    def _add(self, text: list[int]) -> None:
        automaton, texts = self._young
        if sum(map(len, texts)) + len(text) > self.max_tokens // 2:
            self._old, self._young = self._young, (SuffixAutomaton(), [])
            automaton, texts = self._young
        texts.append(text)
        automaton.extend(0, text)
