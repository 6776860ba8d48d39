"""Better Transformer: the same numbers and tokens as eager attention, and a clear refusal where it isn't possible."""

import copy

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.families import FAMILIES, pair, prompts
from helpers.identity import same_as_plain
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomForCausalLM, GPTJForCausalLM, GPTJPreTrainedModel, PreTrainedModel

from hf_specdec.models.better_transformer import (
    BloomSdpaAttention,
    attention_of,
    better_transformer_refusal,
    to_better_transformer,
    to_eager_attention,
)
from hf_specdec.models.cache_names import CACHE_NAME, cache_of

# transformers has no SDPA for GPT-J before 5.24.
NONE = ("gemma2",) if GPTJForCausalLM._supports_sdpa else ("gpt-j", "gemma2")
OFFERED = [family for family in FAMILIES if family not in NONE]
# Logits of these tiny models reach about 10: 1e-5 of float32's figures and as much of their size.
GREEDY = {"max_new_tokens": 16, "do_sample": False}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _both(family: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model with eager attention, and a copy with SDPA."""
    eager = to_eager_attention(pair(family, dtype=dtype)[0])
    fast = to_better_transformer(copy.deepcopy(eager))
    assert (attention_of(eager), attention_of(fast)) == ("eager", "sdpa")
    for model, attention in ((eager, "eager"), (fast, "sdpa")):  # T5's encoder and decoder have a config each
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        assert family == "bloom" or {part.config._attn_implementation for part in parts} == {attention}
    return eager, fast


def _steps(model: PreTrainedModel, widths: tuple[int, ...], rows: int = 3) -> Tensor:
    """Logits `[B, N, V]` of a left-padded batch read in passes of these widths, padding left out (set to 0)."""
    inputs = prompts(rows, length=sum(widths))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    encoder_decoder = model.config.is_encoder_decoder
    encoding = model.get_encoder()(input_ids=ids, attention_mask=mask) if encoder_decoder else None
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, logits, read = None, [], 0
    for width in widths:
        now = slice(read, read := read + width)
        if encoder_decoder:
            inputs = {"encoder_outputs": encoding, "attention_mask": mask, "decoder_input_ids": ids[:, now]}
        else:
            inputs = {"input_ids": ids[:, now], "attention_mask": mask[:, :read]}
            inputs |= {} if model.config.model_type == "bloom" else {"position_ids": positions[:, now]}
        out = model(**inputs, **{CACHE_NAME: cache}, use_cache=True)
        cache = cache_of(out)
        logits.append(out.logits)
    shown = torch.ones_like(mask) if encoder_decoder else mask
    return torch.cat(logits, dim=1) * shown.unsqueeze(-1)


def test_gemma_2_is_refused_for_the_cap_that_sdpa_ignores() -> None:
    """Also where transformers has loaded it with SDPA; without a cap there would be nothing to refuse it for."""
    model, _ = pair("gemma2")
    model.config._attn_implementation = "sdpa"
    assert "attn_logit_softcapping=" in (better_transformer_refusal(model) or "")
    model.config.attn_logit_softcapping = None
    assert better_transformer_refusal(model) is None


@pytest.mark.parametrize("family", OFFERED)
def test_logits_and_tokens_are_those_of_eager_attention(family: str) -> None:
    """Of a prompt, of single tokens and of several."""
    eager, fast = _both(family)
    with torch.no_grad():
        for widths in ((13,), (9, 1, 1, 1, 1), (7, 5, 1)):
            torch.testing.assert_close(_steps(fast, widths), _steps(eager, widths), **CLOSE)
    for rows in (1, 4):
        expected, found = (model.generate(**prompts(rows), **GREEDY) for model in (eager, fast))
        assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["scale", "alibi"])
def test_a_wrong_scale_or_bias_is_seen(wrong: str, monkeypatch) -> None:
    """Negative control: the bound above is tight enough to see a mistake of one part in a thousand."""
    eager, fast = _both("bloom")
    if wrong == "scale":
        for module in fast.modules():
            if isinstance(module, BloomSdpaAttention):
                module.inv_norm_factor *= 1.001
    else:
        build = fast.transformer.build_alibi_tensor
        monkeypatch.setattr(fast.transformer, "build_alibi_tensor", lambda *a, **k: 1.001 * build(*a, **k))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(_steps(fast, (9, 1, 3)), _steps(eager, (9, 1, 3)), **CLOSE)


@torch.no_grad()
def test_bloom_with_no_mask_heads_that_are_no_power_of_two_and_no_cache() -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(pair("bloom")[0].config)
    config.n_head, config.hidden_size = 6, 48
    eager = BloomForCausalLM(config).eval()
    fast = to_better_transformer(copy.deepcopy(eager))
    ids = prompts(2)["input_ids"]
    for settings in ({"use_cache": False}, {"use_cache": True}):
        torch.testing.assert_close(fast(ids, **settings).logits, eager(ids, **settings).logits, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bloom_below_float32_keeps_padded_rows_finite(dtype: torch.dtype) -> None:
    _, fast = _both("bloom", dtype)
    exact, _ = _both("bloom")
    logits = _steps(fast, (9, 1, 3)).float()
    # Five layers of rounding on logits of about 10; the test above has the exact comparison.
    torch.testing.assert_close(logits, _steps(exact, (9, 1, 3)), rtol=0.1, atol=60 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_bloom_under_autocast_keeps_padded_rows_finite() -> None:
    _, fast = _both("bloom")
    inputs = prompts(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(**inputs).logits.isfinite().all()


@pytest.mark.parametrize(("family", "roles"), [("bloom", "both"), ("opt", "target"), ("t5", "draft")])
def test_as_target_and_draft_of_speculation(family: str, roles: str) -> None:
    target, draft = (to_eager_attention(model) for model in pair(family, dtype=torch.float32))
    expected = target.generate(**prompts(4), **GREEDY)
    for role, model in (("target", target), ("draft", draft)):
        if roles in (role, "both"):
            to_better_transformer(model)
    out = same_as_plain(target, draft, prompts(4), GREEDY)
    assert torch.equal(out.sequences, expected) and 0 < out.speculation.acceptance_rate < 1


def test_bloom_pads_in_float64_too() -> None:
    """Where eager attention turns to NaN: its softmax in float32 takes float64's mask for -inf."""
    eager, fast = _both("bloom", torch.float64)
    with torch.no_grad():
        assert _steps(fast, (13,)).isfinite().all()
        assert not eager(**prompts(3)).logits.isfinite().all(), "the control: if this holds, so may the tests"


@torch.no_grad()
def test_sdpa_is_what_runs() -> None:
    """Negative control of all comparisons: the two sides do compute with different functions."""
    eager, fast = _both("bloom")
    for model, expected in ((eager, False), (fast, True)):
        with FlopCounterMode(display=False) as counter:
            model(**prompts(2))
        names = " ".join(str(name) for name in counter.get_flop_counts()["Global"])
        assert ("baddbmm" in names) != expected


def test_undone_it_leaves_no_trace(tmp_path) -> None:
    eager, fast = _both("bloom")
    assert fast.state_dict().keys() == eager.state_dict().keys()
    for model, name in ((eager, "eager"), (fast, "fast")):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "eager").iterdir():
        assert (tmp_path / "fast" / file.name).read_bytes() == file.read_bytes(), file.name
    to_eager_attention(fast)
    assert [type(module) for module in fast.modules()] == [type(module) for module in eager.modules()]


@torch.no_grad()
def test_weights_of_attention_are_still_had_on_request() -> None:
    eager, fast = _both("bloom")
    inputs = prompts(2)
    for ours, theirs in zip(*(m(**inputs, output_attentions=True).attentions for m in (fast, eager)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_modules_that_accelerate_has_hooked_change_too() -> None:
    eager, _ = _both("bloom")
    attention = eager.transformer.h[0].self_attention
    add_hook_to_module(attention, ModelHook())
    to_better_transformer(eager)
    assert attention._old_forward.__func__ is BloomSdpaAttention.forward


@pytest.mark.parametrize("family", NONE)
def test_models_without_it_are_refused_by_name(family: str) -> None:
    model, _ = pair(family)
    refusal = better_transformer_refusal(model)
    assert type(model).__name__ in refusal and "leave better_transformer out" in refusal
    with pytest.raises(ValueError, match="has no Better Transformer"):
        to_better_transformer(model)
    assert to_eager_attention(model) is model


def test_a_model_for_which_transformers_has_no_sdpa(monkeypatch) -> None:
    monkeypatch.setattr(GPTJPreTrainedModel, "_supports_sdpa", False)
    refusal = better_transformer_refusal(pair("gpt-j")[0])
    assert refusal is not None and "transformers has no SDPA attention for GPTJ" in refusal


def test_nothing_is_refused_that_is_offered() -> None:
    assert [f for f in FAMILIES if better_transformer_refusal(pair(f)[0]) is None] == OFFERED
