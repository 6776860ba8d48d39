"""Tiny random targets of every supported family, and noise-perturbed copies of them as drafts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 48
PAD, BOS, EOS = 0, 1, 2
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
DECODER = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
ROPE = {**DECODER, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
OPT = {**DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
ENCODER_DECODER = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_start_token_id": BOS}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **ENCODER_DECODER}


def made(name: str, head: str = "ForCausalLM", **sizes: Any) -> Callable[[], PreTrainedModel]:
    """Makes a model of a class of transformers, of these sizes."""
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, name + head)(config(**{**SPECIAL, **sizes}))


def bart(name: str = "Bart", head: str = "ForConditionalGeneration", **settings: Any) -> Callable[[], PreTrainedModel]:
    """BART, or another whose configuration has the same fields."""
    sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return made(name, head, **sides, forced_eos_token_id=None, **ENCODER_DECODER, **settings)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": made("Llama", **ROPE),
    "qwen2": made("Qwen2", **ROPE),
    "mistral-sliding": made("Mistral", **ROPE, head_dim=8, sliding_window=9),
    "gpt-neox": made("GPTNeoX", **DECODER, intermediate_size=48),
    "opt": made("OPT", **OPT),
    "bloom": made("Bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "gpt2": made("GPT2", "LMHeadModel", **GPT),
    "gpt-j": made("GPTJ", **GPT, rotary_dim=4),
    "gemma2": made("Gemma2", **ROPE, head_dim=8, sliding_window=9, query_pre_attn_scalar=8),
    "t5": made("T5", "ForConditionalGeneration", feed_forward_proj="gated-gelu", **T5),
    "mt5": made("MT5", "ForConditionalGeneration", **T5),
    "bart": bart(),
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
