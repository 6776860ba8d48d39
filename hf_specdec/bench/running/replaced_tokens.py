"""The target's greedy answers that follow when one token is replaced by the draft's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.models.traits import context_length


@torch.no_grad()
def replaced(pair: LoadedPair, prompt: Prompt, answer: Sequence[int], most: int) -> dict[int, list[int]]:
    """By position where the draft's most likely token differs: the answer that follows if that token is taken.

    Args:
        pair: with a draft.
        answer: the target's greedy answer, EOS included.
        most: the most tokens of an answer.
    """
    assert pair.draft is not None
    ids, tokens = list(prompt.token_ids), list(answer)
    start = [pair.target.generation_config.decoder_start_token_id] if pair.encoder_decoder else ids
    text = torch.tensor([[*start, *tokens[:-1]]], device=pair.draft.device)
    source = {"decoder_input_ids": text, "input_ids": torch.tensor([ids], device=text.device)}
    logits = pair.draft(**source if pair.encoder_decoder else {"input_ids": text}).logits[0, len(start) - 1 :]
    choices = logits[:, : pair.target.config.get_text_config().vocab_size].argmax(dim=-1).tolist()
    taken = {place: [*tokens[:place], own] for place, own in enumerate(choices) if own != tokens[place]}
    ends = _ends(pair)
    open_places = [place for place, begun in taken.items() if begun[-1] not in ends and len(begun) < most]
    for group in [open_places] if _fit_together(pair, ids, open_places, most) else [[place] for place in open_places]:
        rows = _continued(pair, ids, [taken[place] for place in group], most)
        taken |= {place: _cut(row[:most], ends) for place, row in zip(group, rows, strict=True)}
    return taken


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
