"""The supported architectures of GGUF files: configurations from metadata, and the names of weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from hf_specdec.gguf.file import GgufFile

# transformers' model type by llama.cpp's name of the architecture. Mistral and SmolLM are "llama" there.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
GEMMA = ("gemma2", "gemma3")  # their files store norm weights plus 1

_PLACES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLACES_OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PLACES_OF = {"phi3": {"ffn_up": "mlp.gate_up_proj"}, "gemma2": _PLACES_OF_GEMMA, "gemma3": _PLACES_OF_GEMMA}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Tensors of rotary factors, which configurations of transformers contain.
_ROPE = re.compile(r"rope_freqs|rope_factors")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")


def check_architecture(file: GgufFile) -> str:
    """llama.cpp's name of a file's architecture.

    Raises:
        ValueError: it is not supported.
    """
    found = file.metadata["general.architecture"]
    if found not in MODEL_TYPES:
        raise ValueError(
            f"{file.path} has the architecture {found!r}; load_gguf supports "
            f"{', '.join(MODEL_TYPES)}. Load it with from_pretrained(…, gguf_file=…), which widens all weights."
        )
    return str(found)


def place_of(name: str, architecture: str) -> str | None:
    """The model's name of a tensor in the file; None if the model has no such weight."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    layer = _IN_LAYER.fullmatch(stem)
    place = layer and {**_PLACES, **_PLACES_OF.get(architecture, {})}.get(layer[2])
    return f"model.layers.{layer[1]}.{place}.{kind}" if layer and place else None


def is_rope(name: str) -> bool:
    """Whether a tensor holds rotary factors, which the model's own configuration contains as well."""
    return _ROPE.search(name) is not None


def config_of(file: GgufFile) -> PreTrainedConfig:
    """The configuration that a file's metadata describes.

    Raises:
        ValueError: metadata are missing, or the rotary scaling cannot be read.
    """
    architecture = check_architecture(file)
    scaling = file.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear") or any(map(is_rope, file.tensors)):
        raise ValueError(
            f"{file.path} has rotary scaling that load_gguf does not read; pass config=, the configuration of the "
            "original model, such as AutoConfig.from_pretrained(…)."
        )
    try:
        values = _values(file, architecture)
    except KeyError as error:
        raise ValueError(f"{file.path} has no {error.args[0]!r} in its metadata; pass config=.") from error
    config: PreTrainedConfig = AutoConfig.for_model(MODEL_TYPES[architecture], **values)
    return config


def _values(file: GgufFile, architecture: str) -> dict[str, Any]:
    def needed(key: str) -> Any:
        return file.metadata[f"{architecture}.{key}"]

    heads, hidden = needed("attention.head_count"), needed("embedding_length")
    head_dim = file.get("attention.key_length") or hidden // heads
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", 10000.0)}
    if file.get("rope.scaling.type", "none") == "linear":
        rope |= {"rope_type": "linear", "factor": file.get("rope.scaling.factor", 1.0)}
    values = {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "max_position_embeddings": needed("context_length"),
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_tokens(file),
    }
    if architecture == "phi3":
        rope["partial_rotary_factor"] = file.get("rope.dimension_count", head_dim) / head_dim
    elif architecture != "qwen2":
        values["head_dim"] = head_dim
    if architecture == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture in ("phi3", *GEMMA):
        values["sliding_window"] = file.get("attention.sliding_window")
    if architecture in GEMMA:
        # The largest model of each family scales attention by another number, which is not in files but in llama.cpp.
        largest = values["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[architecture]
        values["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        values["attn_logit_softcapping"] = file.get("attn_logit_softcapping")
        values["final_logit_softcapping"] = file.get("final_logit_softcapping")
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", 10000.0)}
        values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    return values


def _tokens(file: GgufFile) -> Mapping[str, Any]:
    """The BOS, EOS and padding tokens; chats may end with an EOS token of their own."""
    known = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    ends = [token for token in dict.fromkeys((known["eos"], known["eot"])) if token is not None]
    return {
        "bos_token_id": known["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": known["padding"],
    }
