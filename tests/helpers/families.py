"""Tiny random targets of every supported family, and noise-perturbed copies of them as drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 48
PAD, BOS, EOS = 0, 1, 2
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
DECODER = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
ROPE = {**DECODER, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_start_token_id": BOS, **SPECIAL}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **ENCODER_DECODER}


def bart(
    config: type[PreTrainedConfig] = BartConfig,
    model: type[PreTrainedModel] = BartForConditionalGeneration,
    **settings: Any,
) -> PreTrainedModel:
    """BART, or another whose configuration has the same fields."""
    layers = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _BART_SIDE.items()}
    return model(config(**layers, forced_eos_token_id=None, **ENCODER_DECODER, **settings))


_BART_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**ROPE, **SPECIAL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**ROPE, **SPECIAL)),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**ROPE, head_dim=8, sliding_window=9, **SPECIAL)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**DECODER, intermediate_size=48, **SPECIAL)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**DECODER, ffn_dim=48, word_embed_proj_dim=32, **SPECIAL)),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **SPECIAL)),
    "gpt-j": lambda: GPTJForCausalLM(
        GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **SPECIAL)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**ROPE, head_dim=8, sliding_window=9, query_pre_attn_scalar=8, **SPECIAL)
    ),
    "t5": lambda: T5ForConditionalGeneration(T5Config(feed_forward_proj="gated-gelu", **T5)),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**T5)),
    "bart": bart,
}
# Their eager softmax is taken in float32, where float64's mask value becomes -inf: padded rows turn to NaN.
EAGER = ("bloom", "gemma2")


def exact_dtype(family: str, rows: int) -> torch.dtype:
    """In which speculation has plain `generate`'s tokens: float64, but where padded rows would be NaN in it."""
    return torch.float32 if family in EAGER and rows > 1 else torch.float64


def pair(
    family: str, *, noise: float = 0.15, dtype: torch.dtype = torch.float64
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target of a family and a draft near it."""
    return pair_of(FAMILIES[family], noise=noise, dtype=dtype, seed=sorted(FAMILIES).index(family))


def pair_of(
    make: Callable[[], PreTrainedModel], *, noise: float = 0.15, dtype: torch.dtype = torch.float64, seed: int = 7
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A seeded target, its weights spread so that its text varies, and a perturbed copy as its draft."""
    torch.manual_seed(seed)
    target = make().eval()
    head = target.get_output_embeddings()
    # Untied, since a random tied head answers every token with itself.
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=spread(name))
    draft = perturbed(target, noise)
    return target.to(dtype), draft.to(dtype)


def perturbed(model: PreTrainedModel, noise: float) -> PreTrainedModel:
    """A copy whose matrices are changed in proportion to their spread."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn_like(weight)
    return changed


def spread(name: str) -> float:
    """Strong embeddings and weak cross-attention: text that depends on its own last tokens."""
    if "embed" in name or "shared" in name or "wte" in name:
        return 1.0
    return 0.1 if "EncDecAttention" in name or "encoder_attn" in name else 0.25


def prompts(batch_size: int, length: int = 11, seed: int = 10) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, length]`, left-padded by different amounts beyond the first row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch_size):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def repetitive(batch_size: int, length: int = 11, seed: int = 10) -> dict[str, torch.Tensor]:
    """Prompts that say everything twice, so that look-ups match."""
    once = prompts(batch_size, length, seed)
    twice = once["input_ids"].repeat(1, 2), torch.cat([once["attention_mask"], torch.ones_like(once["input_ids"])], 1)
    return dict(zip(once, twice, strict=True))


# Those that can be fed from a per-row static cache.
ROWS_FAMILIES = [family for family in FAMILIES if family not in ("bloom", "t5", "mt5", "bart")]
