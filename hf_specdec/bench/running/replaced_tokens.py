"""Where lossless speculation rejects a draft's token, and what the target writes if the token is kept there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.settings import Settings
from hf_specdec.models.traits import context_length
from hf_specdec.rules.sampling import draw, probabilities


@torch.no_grad()
def replaced(
    pair: LoadedPair, prompt: Prompt, answer: Sequence[int], settings: Settings
) -> dict[int, tuple[list[int], list[int]]]:
    """By position where lossless speculation rejects the draft's token: what the target writes in either case.

    Args:
        pair: with a draft.
        answer: the target's answer, EOS included, at most `settings.max_new_tokens` long.

    Returns:
        The answers with the target's own token at the position and with the draft's, continued greedily.
    """
    ids, tokens, most = list(prompt.token_ids), list(answer), settings.max_new_tokens
    begun = {place: [*tokens[:place], token] for place, token in rejected(pair, prompt, answer, settings).items()}
    if not settings.sampling:
        own = dict.fromkeys(begun, tokens)
    else:
        own = _all_continued(pair, ids, {place: tokens[: place + 1] for place in begun}, most)
    kept = _all_continued(pair, ids, begun, most)
    return {place: (own[place], kept[place]) for place in begun}


@torch.no_grad()
def rejected(pair: LoadedPair, prompt: Prompt, answer: Sequence[int], settings: Settings) -> dict[int, int]:
    """By position where lossless speculation rejects the draft's token, were it reached: that token.

    Greedy: the draft's most likely token, where it is not the target's. In sampling, the target's token y is given.
    The draft's is another one with probability max(0, 1 - q(y) / p(y)), drawn from max(0, q - p): with these, tokens
    and rejections are distributed as in speculative sampling (Leviathan et al. 2023, algorithm 1).
    """
    assert pair.draft is not None
    drafted, size = _logits(pair, pair.draft, prompt, answer), pair.target.config.get_text_config().vocab_size
    if not settings.sampling:
        choices = drafted[:, :size].argmax(dim=-1).tolist()
        return {place: token for place, token in enumerate(choices) if token != answer[place]}
    q = _warped(drafted[:, :size], settings)
    p = _warped(_logits(pair, pair.target, prompt, answer)[:, :size], settings).to(q.device)
    q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
    own = torch.tensor(list(answer), device=q.device).unsqueeze(1)
    # The same numbers for every draft.
    chance = torch.Generator().manual_seed(settings.seed + prompt.index)
    first, second = torch.rand(2, len(own), generator=chance).to(q.device)
    refused = first * p.gather(1, own).squeeze(1) >= q.gather(1, own).squeeze(1)
    others = draw((q - p).clamp(min=0.0), second).tolist()
    return {place: others[place] for place in refused.nonzero().squeeze(1).tolist() if others[place] >= 0}


def _logits(pair: LoadedPair, model: PreTrainedModel, prompt: Prompt, answer: Sequence[int]) -> Tensor:
    """`[n, V]`: a model's logits at each position of an answer."""
    ids = list(prompt.token_ids)
    start = [pair.target.generation_config.decoder_start_token_id] if pair.encoder_decoder else ids
    text = torch.tensor([[*start, *answer[:-1]]], device=model.device)
    source = {"decoder_input_ids": text, "input_ids": torch.tensor([ids], device=text.device)}
    logits: Tensor = model(**source if pair.encoder_decoder else {"input_ids": text}).logits
    return logits[0, len(start) - 1 :].float()


def _warped(logits: Tensor, settings: Settings) -> Tensor:
    """The probabilities that generate() draws from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    return probabilities(warpers(None, logits))


def _all_continued(pair: LoadedPair, prompt: list[int], begun: dict[int, list[int]], most: int) -> dict[int, list[int]]:
    """The target's greedy continuations of answers, each up to its EOS or to `most` tokens."""
    ends = _ends(pair)
    whole, places = dict(begun), [key for key, row in begun.items() if row[-1] not in ends and len(row) < most]
    for group in [places] if _fit_together(pair, prompt, places, most) else [[place] for place in places]:
        rows = _continued(pair, prompt, [begun[place] for place in group], most)
        whole |= {place: _cut(row[:most], ends) for place, row in zip(group, rows, strict=True)}
    return whole


def _fit_together(pair: LoadedPair, prompt: list[int], places: list[int], most: int) -> bool:
    """Whether answers that begin with this many tokens can be continued in one batch.

    Those of an encoder-decoder model would need padding between its start token and the text.
    """
    if pair.encoder_decoder or not places:
        return False
    bound = context_length(pair.target)
    return bound is None or len(prompt) + most + max(places) - min(places) <= bound


def _continued(pair: LoadedPair, prompt: list[int], begun: list[list[int]], most: int) -> list[list[int]]:
    """The target's greedy continuations of answers; the longest may reach `most` tokens."""
    device, longest = pair.target.device, max(map(len, begun))
    pad = pair.tokenizer.pad_token_id or 0
    if pair.encoder_decoder:
        start = pair.target.generation_config.decoder_start_token_id
        given = {
            "input_ids": torch.tensor([prompt], device=device),
            "attention_mask": torch.ones(1, len(prompt), dtype=torch.long, device=device),
            "decoder_input_ids": torch.tensor([[start, *begun[0]]], device=device),
        }
        offset = 1
    else:
        missing = [longest - len(row) for row in begun]
        given = {
            "input_ids": torch.tensor(
                [[pad] * n + prompt + row for n, row in zip(missing, begun, strict=True)], device=device
            ),
            "attention_mask": torch.tensor(
                [[0] * n + [1] * (len(prompt) + len(row)) for n, row in zip(missing, begun, strict=True)], device=device
            ),
        }
        offset = len(prompt)
    room = most - min(map(len, begun))
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    out = pair.target.generate(**given, **greedy, max_new_tokens=room, pad_token_id=pad).tolist()
    return [row[longest - len(own) + offset :] for row, own in zip(out, begun, strict=True)]


def _ends(pair: LoadedPair) -> set[int | None]:
    stored = pair.target.generation_config.eos_token_id
    return set(stored) if isinstance(stored, (list, tuple)) else {stored}


def _cut(row: list[int], ends: set[int | None]) -> list[int]:
    """Up to the first EOS."""
    return row[: next((place for place, token in enumerate(row, start=1) if token in ends), len(row))]
