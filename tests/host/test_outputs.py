"""What a call returns or leaves behind are ordinary tensors, whatever mode the passes ran in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.families import pair, prompts
from helpers.identity import speculated
from helpers.models import llama, noisy
from helpers.streamer import Streamer
from transformers import (
    DynamicCache,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import hf_specdec
from hf_specdec.models import cache_rollback
from hf_specdec.models.cache_names import CACHE_NAME, cache_of


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_autograd_may_use_everything_that_is_returned(family: str) -> None:
    target, draft = pair(family)
    out = speculated(
        target,
        draft,
        **prompts(2),
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    kept = [out.sequences, *out.scores, *out.logits]
    cache = cache_of(out)
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if family == "t5" else (cache,):
        kept += [tensor for layer in part.layers for tensor in (layer.keys, layer.values)]
    assert not any(tensor.is_inference() for tensor in kept)


STATES = ("encoder_attentions", "encoder_hidden_states")
STATES += ("decoder_attentions", "cross_attentions", "decoder_hidden_states")


def _tensors(states: Any) -> list[torch.Tensor]:
    return [states] if isinstance(states, torch.Tensor) else [tensor for part in states for tensor in _tensors(part)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_states_of_each_token_are_those_of_plain_generate(family: str, rows: int) -> None:
    """Of every place, layer and row, those that ended early included; in sampling, those of the drawn text."""
    target, draft = pair(family)
    target.set_attn_implementation("eager")
    call = {**prompts(rows), "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    call |= {"output_attentions": True, "output_hidden_states": True, "decoder_input_ids": torch.full((rows, 2), 1)}
    end = int(target.generate(**call).sequences[-1, 6])
    plain = target.generate(**call, eos_token_id=end)
    ours = speculated(target, draft, **call, eos_token_id=end)
    assert torch.equal(ours.sequences, plain.sequences) and ours.speculation.drafted > 0
    for name in STATES:
        expected, found = _tensors(plain[name]), _tensors(ours[name])
        assert [tensor.shape for tensor in found] == [tensor.shape for tensor in expected]
        assert expected or family == "t5", "older versions of transformers return no attentions of T5"
        assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
        assert not any(tensor.is_inference() for tensor in found)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_states_are_only_computed_where_a_dict_is_requested(family: str) -> None:
    target, draft = pair(family)
    call = {**prompts(2), "max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**call)
    target.generation_config.output_attentions = target.generation_config.output_hidden_states = True
    passes: list[dict[str, Any]] = []
    for model in (target, draft):
        model.register_forward_pre_hook(lambda model, args, kwargs: passes.append(kwargs), with_kwargs=True)
    assert torch.equal(speculated(target, draft, **call), plain)
    assert passes and not any(
        kwargs.get(f"output_{states}") for kwargs in passes for states in ("attentions", "hidden_states")
    )


def test_states_after_a_cache_with_text_in_it_are_refused(t5_pair) -> None:
    target, draft = t5_pair
    call = {**prompts(1), "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**call)
    more = {**call, "decoder_input_ids": first.sequences, CACHE_NAME: cache_of(first), "output_hidden_states": True}
    message = f"output_hidden_states=True with a filled {CACHE_NAME}=EncoderDecoderCache"
    with pytest.raises(ValueError, match=message):
        speculated(target, draft, **more)


def test_a_given_cache_can_be_trained_on_afterwards() -> None:
    target, draft = pair("llama")
    cache = DynamicCache(config=target.config)
    tokens = speculated(target, draft, **prompts(1), max_new_tokens=6, do_sample=False, **{CACHE_NAME: cache})
    target(tokens[:, -1:], **{CACHE_NAME: cache}).logits.sum().backward()
    assert target.get_output_embeddings().weight.grad is not None


def test_training_goes_on_after_a_call() -> None:
    target, draft = pair("gpt-j")
    inputs = prompts(2)
    speculated(target, draft, **inputs, max_new_tokens=6, do_sample=False)
    for model in (target, draft):
        model(**inputs).logits.sum().backward()
        assert all(weight.grad is not None for weight in model.parameters() if weight.dim() > 1)


def mistral() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MistralConfig(
        vocab_size=64, num_hidden_layers=2, initializer_range=0.2, sliding_window=6, pad_token_id=0, **sizes
    )
    return MistralForCausalLM(config).to(torch.float64).eval()


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_cache_of_ones_own_can_be_gone_on_with(make: Callable[[], PreTrainedModel], error: Any) -> None:
    """Also after a call that broke off: it holds all but the last token shown, and its windows no more than plain."""
    target = make()
    draft = noisy(target)
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    inputs = prompts(1)
    start = inputs["input_ids"].shape[1]
    plain = target.generate(**inputs, **call)
    cache = DynamicCache(config=target.config)
    decoding = hf_specdec.SpeculativeDecoding(draft, num_assistant_tokens=6, streamer=Streamer(error))
    with pytest.raises(error):
        target.generate(**inputs, **call, **{CACHE_NAME: cache}, custom_generate=decoding)
    assert cache.get_seq_length() == start + 3
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert torch.equal(target.generate(plain[:, : start + 4], **{CACHE_NAME: cache}, max_new_tokens=8), plain)
    window = getattr(target.config, "sliding_window", None) or 1000
    assert all(layer.keys.shape[-2] <= window - 1 for layer in cache.layers)


def test_a_pass_that_broke_off_between_two_layers() -> None:
    """The first layer has its tokens, the second has not."""
    target = mistral()
    call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    inputs = prompts(1)
    plain = target.generate(**inputs, **call)
    cache = DynamicCache(config=target.config)
    passes = []

    def broken(*args: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise KeyboardInterrupt

    decoding = hf_specdec.SpeculativeDecoding(noisy(target))
    hook = target.model.layers[1].register_forward_pre_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **call, **{CACHE_NAME: cache}, custom_generate=decoding)
    hook.remove()
    held = cache.get_seq_length()
    assert len({layer.get_seq_length() for layer in cache.layers}) == 1 and held > 8
    left = plain.shape[1] - held - 1
    assert torch.equal(target.generate(plain[:, : held + 1], **{CACHE_NAME: cache}, max_new_tokens=left), plain)


def test_a_refused_call_leaves_the_cache_alone() -> None:
    target = mistral()
    cache = DynamicCache(config=target.config)
    decoding = hf_specdec.SpeculativeDecoding(llama(vocab_size=64 + 1025))
    with pytest.raises(ValueError, match="assistant_model="):
        target.generate(**prompts(1), max_new_tokens=4, **{CACHE_NAME: cache}, custom_generate=decoding)
    assert not any(layer.record_past for layer in cache.layers)


def test_a_window_that_can_not_go_back_is_emptied() -> None:
    """Rows apart: one has read more than is shown when the call breaks off, and its window has moved on."""
    target = mistral()
    inputs = prompts(4)
    call: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    plain = target.generate(**inputs, **call)
    emptied = []
    for shown in range(3, 12):
        cache = DynamicCache(config=target.config)
        decoding = hf_specdec.SpeculativeDecoding(noisy(target, 0.2), streamer=Streamer(RuntimeError, shown))
        with pytest.raises(RuntimeError):
            target.generate(**inputs, **call, **{CACHE_NAME: cache}, custom_generate=decoding)
        emptied.append(cache.get_seq_length() == 0)
        start = inputs["input_ids"].shape[1] + shown
        mask = torch.cat([inputs["attention_mask"], torch.ones(4, shown, dtype=torch.long)], dim=1)
        again = {"attention_mask": mask, CACHE_NAME: cache, "max_new_tokens": 16 - shown, "do_sample": False}
        assert torch.equal(target.generate(plain[:, :start], **again), plain)
    assert any(emptied) and not all(emptied)


def test_a_window_forgets_as_many_tokens_as_it_has_recorded() -> None:
    cache = DynamicCache(config=mistral().config)
    cache_rollback.start_recording(cache)
    for tokens, forgotten in ((20, 0), (5, 2), (3, None)):
        for layer in range(len(cache.layers)):
            cache.update(torch.zeros(1, 1, tokens, 4), torch.zeros(1, 1, tokens, 4), layer)
        if forgotten is not None:
            cache_rollback.forget_last(cache, forgotten)
    assert [cache_rollback.can_forget(cache, 26, count) for count in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_that_use_another_s_keys(rows: int, settings: dict) -> None:
    """Gemma 3n's last layers: transformers' cache has dummies in their place. Decoding goes on from it, too."""
    config = Gemma3nTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=[48] * 4, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=9, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, laurel_rank=8,
        altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    target = Gemma3nForCausalLM(config).eval()
    draft = noisy(target)
    mask = (torch.arange(11) >= 2 * torch.arange(rows)[:, None]).long()
    ids = torch.randint(3, 60, (rows, 11)) * mask
    call = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "eos_token_id": -1}
    plain = target.generate(ids, attention_mask=mask, **call)
    decoding = hf_specdec.SpeculativeDecoding(draft)
    out = target.generate(ids, attention_mask=mask, **call, **settings, custom_generate=decoding)
    assert torch.equal(out.sequences, plain.sequences) and 0 < out.speculation.acceptance_rate < 1
    more = torch.cat([plain.sequences, ids[:, -3:]], dim=1)
    call = {
        "max_new_tokens": 8,
        "do_sample": False,
        "attention_mask": torch.cat([mask, mask.new_ones(rows, 33)], dim=1),
    }
    again = [target.generate(more, **call, **{CACHE_NAME: cache_of(kept)}) for kept in (plain, out)]
    assert torch.equal(*again)
