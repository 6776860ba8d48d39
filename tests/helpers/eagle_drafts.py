"""Tiny random EAGLE-3 drafts in files of the `speculators` format, and what such a draft proposes, token by token."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec import Eagle3Draft

HEADS, KEY_HEADS, SIZE, BASE = 4, 2, 8, 10000.0
READ = [0, 1, 1]  # the target's layers
Weights = dict[str, Tensor]


def stored(
    folder: Path,
    target: PreTrainedModel,
    tokens: Sequence[int] | None = (1, 2, 3, 5, 6, 7),
    *,
    layers: int = 1,
    embeddings: bool = True,
    fields: dict[str, Any] | None = None,
    of_layers: dict[str, Any] | None = None,
    seed: int = 0,
) -> Weights:
    """Write a draft to a folder.

    Args:
        target: the model that it is for.
        tokens: those that it can draft; None for all.
        layers: how many it has.
        embeddings: whether it has its own.
        fields, of_layers: further ones of its configuration and of its layers'.

    Returns:
        What was written, in float64.
    """
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    fields = {"eagle_aux_hidden_state_layer_ids": READ, **(fields or {})}
    of_layers = {"model_type": "llama", **(of_layers or {})}
    features = len(fields["eagle_aux_hidden_state_layer_ids"]) * width

    def random(*shape: int) -> Tensor:
        spread = 0.5 if len(shape) > 1 else 0.2
        return (len(shape) == 1) + spread * torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {"fc.weight": random(width, features), "norm.weight": random(width)}
    weights["lm_head.weight"] = random(vocabulary if tokens is None else len(tokens), width)
    if embeddings:
        weights["embed_tokens.weight"] = random(vocabulary, width)
    for at in range(layers):
        read = width if at else 2 * width
        shapes = {
            "self_attn.q_proj": (HEADS * SIZE, read), "self_attn.k_proj": (KEY_HEADS * SIZE, read),
            "self_attn.v_proj": (KEY_HEADS * SIZE, read), "self_attn.o_proj": (width, HEADS * SIZE),
            "mlp.gate_proj": (48, width), "mlp.up_proj": (48, width), "mlp.down_proj": (width, 48),
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        if not at:
            shapes["hidden_norm"] = (width,)
        if of_layers["model_type"] == "qwen3":
            shapes |= {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)}
        weights |= {f"layers.{at}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    if fields.get("norm_before_fc"):
        weights["input_norm.weight"] = random(features)
    if fields.get("fc_norm"):
        weights |= {f"fc_norm.{at}.weight": random(width) for at in range(features // width)}
    if tokens is not None:
        weights["d2t"] = torch.tensor(tokens) - torch.arange(len(tokens))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, torch.tensor(tokens), True)
    sizes = {
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": SIZE, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256, "rope_theta": BASE,
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.1.0",
        "draft_vocab_size": vocabulary if tokens is None else len(tokens), "torch_dtype": "float64",
        "transformer_layer_config": {**sizes, **of_layers}, **fields,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def draft_for(folder: Path, target: PreTrainedModel, *given: Any, **more: Any) -> Eagle3Draft:
    """Such a draft, loaded; arguments as of `stored`."""
    stored(folder, target, *given, **more)
    return Eagle3Draft.from_pretrained(folder)


def proposed(folder: Path, target: PreTrainedModel, weights: Weights, text: Tensor, count: int) -> list[int]:
    """The most probable `count` tokens after a text `[n]`, which the draft reads whole for each of them."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["transformer_layer_config"]
    embeddings = weights.get("embed_tokens.weight", target.get_input_embeddings().weight)
    with torch.no_grad():
        hidden = target(input_ids=text[None], output_hidden_states=True).hidden_states
        parts = [hidden[layer][0, :-1] for layer in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            parts = [_normed(part, weights[f"fc_norm.{at}.weight"]) for at, part in enumerate(parts)]
        joined = torch.cat(parts, dim=-1)
        if config.get("norm_before_fc"):
            joined = _normed(joined, weights["input_norm.weight"])
        states, tokens, found = joined @ weights["fc.weight"].T, text[1:], []
        for _ in range(count):
            made = _made(states, embeddings[tokens], weights, config, layers)
            normed = _normed(made, weights["norm.weight"])
            best = int((normed[-1] @ weights["lm_head.weight"].T).argmax())
            best += int(weights["d2t"][best]) if "d2t" in weights else 0
            found.append(best)
            tokens = torch.cat([tokens, torch.tensor([best])])
            states = torch.cat([states, (normed if config.get("norm_output") else made)[-1:]])
        return found


def _made(states: Tensor, embedded: Tensor, weights: Weights, config: Any, layers: Any) -> Tensor:
    for at in range(layers["num_hidden_layers"]):
        own = {
            name.removeprefix(f"layers.{at}."): weight for name, weight in weights.items() if f"layers.{at}." in name
        }
        kind = (layers.get("layer_types") or {at: "full_attention"})[at]
        window = layers["sliding_window"] if kind == "sliding_attention" else None
        norm = own["input_layernorm.weight"]
        if at:
            read = _normed(states, norm)
        else:
            normed = _normed(states, own["hidden_norm.weight"])
            read = torch.cat([_normed(embedded, norm), normed], dim=-1)
            states = normed if config.get("norm_before_residual") else states
        states = states + _attended(read, own, window)
        normed = _normed(states, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ own["mlp.gate_proj.weight"].T)
        states = states + (gate * (normed @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return states


def _attended(read: Tensor, own: Weights, window: int | None) -> Tensor:
    length = len(read)
    heads = []
    for name, count in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
        one = (read @ own[f"self_attn.{name}_proj.weight"].T).view(length, count, SIZE).transpose(0, 1)
        if (norm := own.get(f"self_attn.{name}_norm.weight")) is not None:
            one = _normed(one, norm)
        heads.append(one if name == "v" else _turned(one))
    queries, keys, values = heads
    keys, values = (one.repeat_interleave(HEADS // KEY_HEADS, dim=0) for one in (keys, values))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = (queries @ keys.transpose(1, 2) / math.sqrt(SIZE)).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).reshape(length, -1) @ own["self_attn.o_proj.weight"].T


def _turned(heads: Tensor) -> Tensor:
    """Rotary positions: pairs of halves are turned by the place times a frequency."""
    frequencies = BASE ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.arange(heads.shape[1])[:, None] * frequencies
    one, other = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], dim=-1)


def _normed(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states * (states.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
