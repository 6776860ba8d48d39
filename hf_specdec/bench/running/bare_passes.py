"""Times of bare forward passes on the same engine and shapes: what decoding could cost at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.inputs.prompts import Prompt, context_length
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.running.timed_call import synchronize
from hf_specdec.models.traits import pass_mode

# Draft steps before each verification; more of them would tell nothing new.
_STEPS = 4


class RawForwards:
    """Takes the times of bare forward passes, a sample at a time, so that they can be taken between runs.

    Args:
        pair: what is timed; without a draft the target's steps alone.
        lookahead: the widest verification has one token more.
        new_tokens: half of them stand behind the prompt.
    """

    def __init__(self, pair: LoadedPair, lookahead: int, new_tokens: int):
        self.pair = pair
        self.lookahead = lookahead if pair.draft is not None else 0
        self.new_tokens = new_tokens
        self._steps: dict[int, tuple[Callable[[int], None], Callable[[int], None] | None]] = {}

    def sample(self, prompt: Prompt) -> dict[str, Any]:
        """Times each shape at the context that decoding this prompt has half-way: prompt and half the new
        tokens.

        In the order of decoding, draft steps and then a verification, for every width that a round may have:
        a model that was just run finds its weights in the processor's cache, and so it is in a round.

        Returns:
            {"draft_step": [seconds, ...], "target": {"1": [seconds], ..., str(lookahead + 1): [seconds]}}
        """
        length = len(prompt.token_ids)
        with pass_mode(*self.pair.models)():  # as our passes run
            if length not in self._steps:
                self._steps[length] = self._build_steps(prompt.token_ids)
                # The first pass of a shape allocates: run it uncounted.
                self._round_of_each_width(length)
            return self._round_of_each_width(length)

    def _round_of_each_width(self, length: int) -> dict[str, Any]:
        target_step, draft_step = self._steps[length]
        draft_times: list[float] = []
        target_times: dict[str, list[float]] = {}
        for width in range(1, self.lookahead + 2):
            for _ in range(min(self.lookahead, _STEPS)):
                assert draft_step is not None
                draft_times.append(self._timed(draft_step, 1))
            target_times[str(width)] = [self._timed(target_step, width)]
        return {"draft_step": draft_times, "target": target_times}

    def _timed(self, step: Callable[[int], None], width: int) -> float:
        synchronize(self.pair)
        start = time.perf_counter()
        step(width)
        synchronize(self.pair)
        return time.perf_counter() - start

    def _build_steps(self, token_ids: Sequence[int]) -> tuple[Callable[[int], None], Callable[[int], None] | None]:
        def step_of(model: PreTrainedModel) -> Callable[[int], None]:
            return build_step(self.pair, model, [token_ids], max(1, self.new_tokens // 2), self.lookahead + 1)

        return step_of(self.pair.target), None if self.pair.draft is None else step_of(self.pair.draft)


def build_step(
    pair: LoadedPair, model: PreTrainedModel, rows: Sequence[Sequence[int]], behind: int, widest: int
) -> Callable[[int], None]:
    """A function that runs `width` tokens, at most `widest`, on a filled cache and forgets them again.

    Args:
        pair: whose context bounds the text in the cache.
        model: target or draft.
        rows: prompts of one length.
        behind: tokens that are in the cache behind the prompt (of an encoder-decoder: in the decoder's).
        widest: the most tokens of one pass.
    """
    text = text_behind(model, rows, behind + widest)
    prompt, continuation = text[:, : len(rows[0])], text[:, len(rows[0]) :]
    if model.config.is_encoder_decoder:
        encoded = model.get_encoder()(input_ids=prompt)
        fixed = {"encoder_outputs": encoded, "attention_mask": torch.ones_like(prompt)}
        key, filled = "decoder_input_ids", continuation[:, :behind]
    else:
        fixed = {}
        room = context_length(pair)
        most = None if room is None else room - widest
        key, filled = "input_ids", text[:, : len(rows[0]) + behind][:, :most]
    cache = model(**{key: filled}, **fixed, use_cache=True).past_key_values
    cache.activate_past_recording()

    def step(width: int) -> None:
        model(**{key: continuation[:, :width]}, **fixed, past_key_values=cache, use_cache=True)
        cache.crop(-width)

    return step


def text_behind(model: PreTrainedModel, rows: Sequence[Sequence[int]], more: int) -> Tensor:
    """`[B, P + more]`: prompts of one length, said again and again until so many tokens stand behind them."""
    prompt = torch.tensor(rows, device=model.device) % model.config.get_text_config().vocab_size
    length = prompt.shape[1]
    return prompt.repeat(1, 2 + more // length)[:, : length + more]
