"""Pairs that differ in vocabulary or dtype or are quantized, and calls that continue a cache: plain tokens."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import families
from helpers.identity import same_as_plain
from helpers.models import PAD, encoder_prompts, noisy, prompts, resized, t5
from helpers.pairwise import pairwise
from optimum.quanto import freeze, qint4, qint8, qtype, quantize
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specdec import last_speculation
from hf_specdec.bench.models.precision import unpack_without_compiler
from hf_specdec.drafting.model_drafter import align_vocabulary
from hf_specdec.models.cache_names import CACHE_NAME

pytestmark = pytest.mark.usefixtures("enabled")
NEW_TOKENS = 20
SPECULATIVE = {"generation_strategy": "speculative", "num_assistant_tokens": 4}


def both(pair: tuple[PreTrainedModel, PreTrainedModel], **call: Any) -> tuple[Tensor, Tensor]:
    """What plain and speculative `generate` answer to the same greedy call."""
    call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **call}
    return pair[0].generate(**call), pair[0].generate(**call, assistant_model=pair[1], **SPECULATIVE)


@pytest.mark.parametrize(
    ("sizes", "rows", "settings"), pairwise(((72, 64), (64, 72), (72, 60)), (1, 4), ({}, {"repetition_penalty": 1.4}))
)
def test_padded_vocabularies_of_other_sizes(pair, rows: int, sizes: tuple[int, int], settings: dict) -> None:
    """Also where the target really uses tokens that the draft does not have."""
    models = resized(pair[0], sizes[0]), resized(pair[1], sizes[1])
    with torch.no_grad():
        models[0].lm_head.weight[-4:] *= 1.5
    expected, output = both(models, **prompts(rows), **settings, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected.sequences)
    if rows == 4:
        assert output.speculation.accepted > 0
    if rows == 4 and sizes[0] > sizes[1]:
        assert (output.sequences >= sizes[1]).any(), "the target has to use its own tokens for the test to bite"


def test_missing_tokens_have_probability_0_and_padding_is_cut() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    assert align_vocabulary(logits, 4).softmax(dim=-1).tolist() == [[*logits.softmax(dim=-1)[0].tolist(), 0.0, 0.0]]
    assert align_vocabulary(logits, 1).tolist() == [[1.0]]


@pytest.mark.parametrize("sizes", [(72, 64), (64, 72)])
def test_sampling_over_padded_vocabularies_stays_in_the_target_s(pair, sizes: tuple[int, int]) -> None:
    models = resized(pair[0], sizes[0]), resized(pair[1], sizes[1])
    torch.manual_seed(0)
    output = models[0].generate(
        **prompts(4), do_sample=True, max_new_tokens=40, assistant_model=models[1], **SPECULATIVE, top_k=0
    )
    assert int(output.max()) < sizes[0]


@pytest.mark.parametrize(
    ("dtype", "rows", "encoder_decoder"), pairwise((torch.float32, torch.bfloat16), (1, 4), (False, True))
)
def test_a_draft_in_another_dtype(pair, rows: int, dtype: torch.dtype, encoder_decoder: bool) -> None:
    target, draft = (pair[0], deepcopy(pair[1])) if not encoder_decoder else (t5(), noisy(t5()))
    expected, output = both((target, draft.to(dtype)), **prompts(rows))
    assert torch.equal(output, expected)
    stats = last_speculation(target)
    assert stats is not None and stats.accepted > 0


class StopAt(StoppingCriteria):
    """Stops all rows at a length that no round need end at."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize(("stop", "window", "as_dict"), pairwise((None, 12, 13, 14), (None, 8), (False, True)))
def test_a_conversation_over_a_cache_of_the_user_s(pair, stop: int | None, as_dict: bool, window: int | None) -> None:
    """The second turn reads the cache that the first one left, which holds all but the last token shown."""
    target, draft = pair
    if window is not None:
        target = _with_window(window)
        draft = noisy(target)
    texts = []
    for speculation in ({}, {"assistant_model": draft, **SPECULATIVE}):
        cache = DynamicCache(config=target.config)
        text = prompts(1)["input_ids"]
        for turn in range(3):
            criteria = StoppingCriteriaList([] if stop is None else [StopAt(stop + 10 * turn)])
            output = target.generate(
                text,
                attention_mask=torch.ones_like(text),
                **{CACHE_NAME: cache},
                do_sample=False,
                max_new_tokens=9,
                eos_token_id=None,
                pad_token_id=PAD,
                stopping_criteria=criteria,
                return_dict_in_generate=as_dict,
                **speculation,
            )
            text = output.sequences if as_dict else output
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, torch.tensor([[7, 8, 9 + turn]])], dim=1)
        texts.append(text)
    assert torch.equal(*texts)


def _with_window(window: int) -> PreTrainedModel:
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=window, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(torch.float64).eval()


@pytest.mark.parametrize("lookahead", [16, 24])
def test_drafts_are_as_long_as_asked_for_where_positions_are_unlimited(lookahead: int, enabled) -> None:
    target = t5()
    call = {**encoder_prompts(1), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    settings = {"generation_strategy": "speculative", "num_assistant_tokens": lookahead}
    out = target.generate(**call, assistant_model=target, **settings, return_dict_in_generate=True)
    assert max(max(drafts.drafted) for drafts in out.speculation.rounds) == lookahead
    assert torch.equal(out.sequences, target.generate(**call))


@pytest.mark.parametrize(
    ("weights", "quantized", "batch_size"), pairwise((qint8, qint4), ("target", "draft", "both"), (1, 4))
)
def test_weights_of_eight_and_four_bits(weights: qtype, quantized: str, batch_size: int) -> None:
    unpack_without_compiler()
    target, draft = families.pair("llama", noise=0.05, dtype=torch.float32)
    full = deepcopy(target)
    for name, model in {"target": target, "draft": draft}.items():
        if quantized in (name, "both"):
            quantize(model, weights=weights)
            freeze(model)
    inputs, settings = families.prompts(batch_size), {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    out = same_as_plain(target, draft, inputs, settings)
    assert 0 < out.speculation.acceptance_rate < 1
    logits = [model(**inputs).logits for model in (target, full)]
    assert torch.equal(*logits) is (quantized == "draft"), "the weights are those of fewer bits"
