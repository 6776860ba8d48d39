"""Output heads that compute the logits of some tokens only, since most of a small draft is its vocabulary projection.

Drafts with such a head stay lossless: the acceptance rules see the distribution that a draft was drawn from, in which
tokens outside the list have probability 0. They are never proposed, but the target may still choose them.
"""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.models.traits import wrapped_model


class TrimmedHead(torch.nn.Linear):
    """An output head that computes the logits of K of V tokens.

    Args:
        head: the full head; the selected rows and biases are copied.
        token_ids: `[K]`, distinct, on the head's device.
        tied: whether the full head is the input embedding. A state dictionary then leaves out the copied rows, so that
            a saved model is complete. Otherwise `state_dict` raises ValueError, since they could not be loaded again.
    """

    token_ids: Tensor

    def __init__(self, head: torch.nn.Linear, token_ids: Tensor, *, tied: bool) -> None:
        super().__init__(head.in_features, len(token_ids), head.bias is not None, device="meta")
        self.weight = torch.nn.Parameter(head.weight.detach()[token_ids], requires_grad=False)
        if head.bias is not None:
            self.bias = torch.nn.Parameter(head.bias.detach()[token_ids], requires_grad=False)
        self.vocabulary = head.out_features
        self.tied = tied and head.bias is None
        self.register_state_dict_post_hook(_without_rows)
        self.train(head.training)
        self.register_buffer("token_ids", token_ids, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden states `[..., H]`; -inf for tokens outside the list."""
        return among_all(super().forward(input), self.token_ids, self.vocabulary)


def _without_rows(head: TrimmedHead, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if not head.tied:
        raise ValueError(
            "the draft's head is trimmed, and some of its rows alone can't be loaded again: call restore() of the "
            "handle that trim_draft_head returned, then save the draft."
        )
    del state[f"{prefix}weight"]


class TrimmedDraft:
    """A draft whose head is trimmed, see `trim_draft_head`. As a context manager, it is undone on exit.

    Args:
        draft: the model.
        head, trimmed: its full head, and the one that replaces it.
    """

    def __init__(self, draft: PreTrainedModel, head: torch.nn.Linear, trimmed: TrimmedHead) -> None:
        self.draft, self.head, self.trimmed = draft, head, trimmed
        _replace(draft, head, trimmed)
        self._listed = getattr(draft.config, "draft_tokens", None)
        draft.config.draft_tokens = as_ranges(trimmed.token_ids.tolist())

    def restore(self) -> None:
        """Restore the draft's full head, in the dtype and on the device that the draft has now."""
        _replace(self.draft, self.trimmed, self.head.to(self.trimmed.weight))
        self.draft.config.draft_tokens = self._listed

    def __enter__(self) -> TrimmedDraft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def trim_draft_head(draft: PreTrainedModel, token_ids: Iterable[int] | Tensor | None = None) -> TrimmedDraft:
    """Restrict a draft to a list of tokens, so that its steps compute only their logits.

    The output stays the target's. Lists of frequent tokens come from FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and
    VocabTrim (arXiv 2506.22694); `frequent_tokens` makes one. The input embedding is unchanged. The selected rows are
    copied, which takes K · H numbers in the head's dtype; they don't follow later changes of the weights, so load and
    train the draft before. A draft whose head is its input embedding can be saved unchanged: the folder holds the full
    head, and its configuration lists the tokens as `draft_tokens`, see `as_ranges`. Save others after `restore`.

    Args:
        draft: the draft model, modified in place.
        token_ids: K tokens of the draft's vocabulary, in any order; None: those that its configuration lists as
            `draft_tokens`, as the drafts of `--task draft` do.

    Returns:
        A handle, usable as a context manager; its `restore` undoes the change. If it is not kept, a full head that is
        not tied to the input embedding is freed.

    Raises:
        TypeError: `token_ids` holds something else than integers.
        ValueError: an empty list, a token outside the vocabulary, or a model without an ordinary linear output head.
    """
    model = wrapped_model(draft)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = f"draft={type(draft).__name__}"
    if isinstance(head, TrimmedHead):
        raise ValueError(f"{name} is trimmed already: call restore() of its handle first.")
    if type(head) is not torch.nn.Linear or type(head.weight) is not torch.nn.Parameter or head.weight.is_meta:
        found = "no output head" if head is None else f"the output head {type(head).__name__}"
        raise ValueError(f"{name} has {found}, which can't be trimmed; pass a model with a torch.nn.Linear head.")
    tokens = _token_ids(listed_tokens(model.config) if token_ids is None else token_ids)
    if not tokens:
        raise ValueError("token_ids is empty: pass the tokens that the draft may propose, see frequent_tokens.")
    if tokens[0] < 0 or tokens[-1] >= head.out_features:
        wrong = tokens[0] if tokens[0] < 0 else tokens[-1]
        raise ValueError(
            f"token_ids holds {wrong}, but {name} has tokens 0 to {head.out_features - 1}: pass ids of its tokenizer."
        )
    tied = head.weight is getattr(model.get_input_embeddings(), "weight", None)
    return TrimmedDraft(model, head, TrimmedHead(head, torch.tensor(tokens, device=head.weight.device), tied=tied))


def frequent_tokens(texts: Iterable[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """The most frequent tokens of texts that resemble the target's output, the most frequent first.

    The tokens that end a text and those of the chat template are always included.

    Args:
        texts: answers of the target and prompts, as text or as tokens (such as rows of `generate`'s output).
        tokenizer: the draft's tokenizer.
        count: the most tokens to return.

    Raises:
        TypeError: `texts` is one text instead of a list of them.
        ValueError: `count` is too small for the tokens that are always included.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts={reprlib.repr(texts)} is one text; pass a list of texts.")
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update(tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else map(int, text))
    always = _always_included(tokenizer)
    if count < max(len(always), 1):
        raise ValueError(
            f"count={count} is below the {max(len(always), 1)} tokens that are always included (end of text, chat "
            "template): pass a larger number."
        )
    ranked = [token for token, _ in seen.most_common() if token not in always]
    chosen = {*always, *ranked[: count - len(always)]}
    return sorted(chosen, key=lambda token: (-seen[token], token))


def as_ranges(tokens: Iterable[int]) -> str:
    """Distinct tokens as text, such as "0-255 300 302-303".

    A list of thousands would fill a configuration, which transformers copies several times in each call.
    """
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and ranges[-1][-1] == token - 1:
            ranges[-1][1:] = [token]
        else:
            ranges.append([token])
    return " ".join("-".join(map(str, ends)) for ends in ranges)


def listed_tokens(config: PreTrainedConfig) -> list[int]:
    """The tokens that a draft's configuration lists as `draft_tokens`, in ranges or one by one; none by default."""
    listed = getattr(config, "draft_tokens", None)
    if not isinstance(listed, str):
        return list(listed or ())
    found: list[int] = []
    for part in listed.split():
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def among_all(logits: Tensor, token_ids: Tensor, vocabulary: int) -> Tensor:
    """Logits `[..., K]` of K tokens `[K]` as those of a whole vocabulary `[..., V]`; -inf for the others."""
    others = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    return others.scatter_(-1, token_ids.expand_as(logits), logits)


def head_tokens(model: PreTrainedModel) -> int | None:
    """The number of tokens for which a model's output head computes logits; None if unknown."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return getattr(head, "out_features", None)


def _token_ids(given: Any) -> list[int]:
    """Token ids in ascending order, each once.

    Raises:
        TypeError: something else than integers, including booleans, which look like a mask, and mappings.
    """
    try:
        listed = list(given.tolist() if isinstance(given, Tensor) else given)
        if isinstance(given, (Mapping, bytes)) or any(isinstance(token, bool) for token in listed):
            raise TypeError
        return sorted({operator.index(token) for token in listed})
    except TypeError as error:
        raise TypeError(f"token_ids={reprlib.repr(given)}: pass a list of integers, the token ids.") from error


def _always_included(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end of text, and the tokens around the turns of a dialogue in the chat template."""
    found = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if getattr(tokenizer, "chat_template", None):
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        found.update(tokenizer.apply_chat_template(chat, return_dict=False))
    return found


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
