"""Pairs that differ in vocabulary, dtype or tokenizer, and calls that continue a cache: plain `generate`'s tokens."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.models import PAD, encoder_prompts, llama, noisy, prompts, resized, t5
from helpers.word_tokenizer import word_tokenizer
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
from hf_specdec.drafting.model_drafter import align_vocabulary
from hf_specdec.models.cache_names import CACHE_NAME

pytestmark = pytest.mark.usefixtures("enabled")
NEW_TOKENS = 20
SPECULATIVE = {"generation_strategy": "speculative", "num_assistant_tokens": 4}


def both(pair: tuple[PreTrainedModel, PreTrainedModel], **call: Any) -> tuple[Tensor, Tensor]:
    """What plain and speculative `generate` answer to the same greedy call."""
    call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **call}
    return pair[0].generate(**call), pair[0].generate(**call, assistant_model=pair[1], **SPECULATIVE)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("sizes", [(72, 64), (64, 72), (72, 60)])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.4}], ids=["bare", "processors"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("encoder_decoder", [False, True])
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


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("stop", [None, 12, 13, 14])
@pytest.mark.parametrize("window", [None, 8])
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


@pytest.fixture(scope="module")
def strangers() -> dict[str, Any]:
    """A draft whose tokenizer has the same words under other ids, and not all of them."""
    target = llama()
    draft = llama(seed=7, vocab_size=50)
    with torch.no_grad():
        ours, theirs = word_tokenizer().get_vocab(), word_tokenizer(50, order=-1).get_vocab()
        shared = [word for word in theirs if word in ours]
        mine, other = [ours[w] for w in shared], [theirs[w] for w in shared]
        draft.load_state_dict({**noisy(target).state_dict(), **_rows_of(target, mine, other, len(theirs))})
    tokenizers = {"tokenizer": word_tokenizer(), "assistant_tokenizer": word_tokenizer(50, order=-1)}
    return {"target": target, "draft": draft, "tokenizers": tokenizers}


def _rows_of(target: PreTrainedModel, mine: list[int], other: list[int], size: int) -> dict[str, Tensor]:
    """The target's embeddings and head, reordered."""
    tables = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = torch.zeros(size, target.config.hidden_size, dtype=torch.float64)
        table[other] = target.state_dict()[name][mine]
        tables[name] = table
    return tables


def _state(model: PreTrainedModel) -> tuple[Any, ...]:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, model.generation_config.to_dict(), model.get_output_embeddings(), model.get_input_embeddings()


@pytest.mark.parametrize("sampling", [False, True])
def test_different_tokenizers_leave_the_draft_as_it_was(strangers, sampling: bool) -> None:
    """Greedy output is plain's; head, embeddings and `generation_config` of the draft stay the very same."""
    target, draft = strangers["target"], strangers["draft"]
    draft.generation_config.repetition_penalty = 1.1
    before = _state(draft)
    torch.manual_seed(0)
    call = {
        **prompts(1),
        "do_sample": sampling,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    output = target.generate(**call, assistant_model=draft, **SPECULATIVE, **strangers["tokenizers"])
    after = _state(draft)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]
    assert before[2] is after[2] and before[3] is after[3]
    stats = last_speculation(target)
    assert stats is not None and stats.accepted > 0
    if not sampling:
        assert torch.equal(output, target.generate(**call))


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_constraint_is_not_asked_about_a_translated_draft_that_it_forbids(do_sample: bool, enabled) -> None:
    target, draft = llama(), noisy(llama(), 0.02)
    inputs = prompts(1)
    length = inputs["input_ids"].shape[1]

    def allowed(row: int, text: Tensor) -> list[int]:
        assert all(token % 2 == 0 for token in text[length:].tolist()), "asked about a text that it forbids"
        return list(range(2, 64, 2))

    call = {"max_new_tokens": 20, "do_sample": do_sample, "eos_token_id": None, "prefix_allowed_tokens_fn": allowed}
    tokenizers = {"tokenizer": word_tokenizer(64), "assistant_tokenizer": word_tokenizer(64, -1)}
    out = target.generate(
        **inputs, **call, **tokenizers, assistant_model=draft, generation_strategy="speculative",
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.speculation.accepted < out.speculation.drafted, "some of the drafts are forbidden"
    assert all(token % 2 == 0 for token in out.sequences[0, length:].tolist())
    if not do_sample:
        assert torch.equal(out.sequences, target.generate(**inputs, **call))


@pytest.mark.parametrize("lookahead", [16, 24])
def test_drafts_are_as_long_as_asked_for_where_positions_are_unlimited(lookahead: int, enabled) -> None:
    target = t5()
    call = {**encoder_prompts(1), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    settings = {"generation_strategy": "speculative", "num_assistant_tokens": lookahead}
    out = target.generate(**call, assistant_model=target, **settings, return_dict_in_generate=True)
    assert max(max(drafts.drafted) for drafts in out.speculation.rounds) == lookahead
    assert torch.equal(out.sequences, target.generate(**call))
