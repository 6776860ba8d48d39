"""Tiny random models with recurrent layers, and noisy copies of them as their drafts."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from helpers.families import SPECIAL, VOCABULARY, perturbed

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "tie_word_embeddings": False, **SPECIAL}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
# The gated delta rule.
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
# The state-space scan.
SCAN = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "num_hidden_layers": 3}

# The nine whose wide passes continue from a cached state as single ones do.
SETTINGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**DELTA, **ATTENTION, **EXPERTS, "head_dim": 16},
    "Qwen3_5Text": {**DELTA, **ATTENTION, "head_dim": 16},
    "Mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "num_hidden_layers": 2,
        "chunk_size": 16,
    },
    "FalconH1": {**SCAN, **ATTENTION, "mamba_d_ssm": 64, "mamba_d_head": 16, "num_hidden_layers": 2},
    "GraniteMoeHybrid": {
        **{**SCAN, **ATTENTION},
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_d_head": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "OlmoHybrid": {**DELTA, **ATTENTION},
    "Zamba2": {
        **ATTENTION,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "chunk_size": 16,
        "adapter_rank": 4,
    },
    "NemotronH": {
        **{**ATTENTION, "head_dim": 16},
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "Lfm2": {**ATTENTION, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
}
# Their wide passes differ from single ones in transformers itself.
UNEVEN: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8, "num_hidden_layers": 2},
    "FalconMamba": {"state_size": 8, "num_hidden_layers": 2},
    "Jamba": {
        **{**ATTENTION, **{"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False}},
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
    },
    "Bamba": {**{**SCAN, **ATTENTION}, "attn_layer_indices": [1], "mamba_d_head": 16},
    "RecurrentGemma": {**ATTENTION, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64},
}
FAMILIES = tuple(SETTINGS)
# States that fade slowly and matter more than a layer's direct path, so that a wrong one changes the text.
LONG_MEMORY = {"A_log": -2.5, "dt_bias": 0.5, "D": 0.1}


def model(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """A seeded model, its weights spread so that its text varies."""
    settings = {**COMMON, **(SETTINGS | UNEVEN)[family], **overrides}
    causal: Callable[..., PreTrainedModel] = getattr(transformers, family.removesuffix("Text") + "ForCausalLM")
    torch.manual_seed(seed)
    made = causal(getattr(transformers, family + "Config")(**settings)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "embed" in name else 0.3)
            elif (last := name.split(".")[-1]) in LONG_MEMORY:
                weight.fill_(LONG_MEMORY[last])
            elif "conv" in name:
                weight.normal_(std=0.7)
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")  # the default has no float64
    return made.to(dtype)


def noisy(target: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """A perturbed copy of a target."""
    torch.manual_seed(7)
    return perturbed(target, noise)
