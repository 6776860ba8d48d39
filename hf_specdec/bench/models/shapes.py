"""Shapes of published models, and of drafts that cost a given part of them; nothing is built here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdec.embedded.tokenization import VOCAB_SIZE

_TINY = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}  # fmt: skip
_ROPE = "rope_parameters"

# As in the published configurations, except the contexts of SmolLM and TinyLlama: theirs are 2048, too short for an
# answer to a prompt of 2048. The tiny shapes are for tests and for trying a command out. Their wider initial weights
# give the layers as much influence as at real sizes.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm-135m": {
        "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen2-0.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        _ROPE: {"rope_type": "default", "rope_theta": 1e6},
    },
    "tinyllama-1.1b": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "llama-2-7b": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        _ROPE: {"rope_type": "default", "rope_theta": 1e6},
    },
    "falcon-h1-0.5b": {
        "model_type": "falcon_h1", "vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 128,
        "max_position_embeddings": 16_384,
    },
    "opt-6.7b": {
        "model_type": "opt", "vocab_size": 50_272, "hidden_size": 4096, "ffn_dim": 16_384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "tiny-llama": {"model_type": "llama", "intermediate_size": 128, "initializer_range": 0.1, **_TINY},
    "tiny-qwen2": {
        "model_type": "qwen2", "intermediate_size": 128, "initializer_range": 0.1, "num_key_value_heads": 2, **_TINY,
    },
    "tiny-opt": {"model_type": "opt", "ffn_dim": 128, "init_std": 0.1, **_TINY},
    "tiny-falcon-h1": {
        "model_type": "falcon_h1", "intermediate_size": 128, "initializer_range": 0.1, "num_key_value_heads": 2,
        "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_chunk_size": 16, **_TINY,
    },
}  # fmt: skip

# What writes to the residual stream in each layer.
OUTPUT_PROJECTIONS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen2": ("self_attn.o_proj", "mlp.down_proj"),
    "opt": ("self_attn.out_proj", "fc2"),
    "falcon_h1": ("self_attn.o_proj", "mamba.out_proj", "feed_forward.down_proj"),
}


def draft_shape(target: str, width: int, layers: int) -> dict[str, Any]:
    """A draft of the target's architecture, vocabulary and context: heads of 64 (or 32), an inner width of 4 × `width`.

    At `width` 768 and 2 layers that is LLaMA-68M. The draft of a target with recurrent layers is a LLaMA.
    """
    heads = width // (32 if width % 64 else 64)
    base = SHAPES[target]
    if is_hybrid(base):
        shared = ("vocab_size", "max_position_embeddings", "initializer_range", "num_key_value_heads")
        base = {"model_type": "llama", **{key: base[key] for key in shared if key in base}}
    inner = "ffn_dim" if base["model_type"] == "opt" else "intermediate_size"
    shape = {**base, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if "num_key_value_heads" in shape:
        shape["num_key_value_heads"] = heads
    return {**shape, inner: 4 * width}


def is_hybrid(shape: Mapping[str, Any]) -> bool:
    """Whether it has recurrent layers beside attention."""
    return "mamba_d_ssm" in shape


def width_for_cost(target: str, cost: float, layers: int = 2) -> int:
    """The width, a multiple of 32 from 64 on, at which a draft costs most nearly `cost`."""
    return min(range(64, 32_768, 32), key=lambda width: abs(relative_cost(target, width, layers) - cost))


def relative_cost(target: str, width: int, layers: int = 2) -> float:
    """Bytes that a step of such a draft reads, over those of the target's, both in one dtype."""
    return _read_weights(draft_shape(target, width, layers)) / _read_weights(SHAPES[target])


def _read_weights(shape: Mapping[str, Any]) -> int:
    """Weights of the matrices that a step reads: the layers' and the head's."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 2 * width * heads * shape.get("head_dim", width // heads)
    attention *= 1 + shape.get("num_key_value_heads", heads) / heads
    if is_hybrid(shape):
        states = 2 * shape["mamba_d_state"] + shape["mamba_n_heads"]
        attention += width * (3 * shape["mamba_d_ssm"] + states)
    inner = 2 * width * shape["ffn_dim"] if "ffn_dim" in shape else 3 * width * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * (attention + inner) + width * shape["vocab_size"])
