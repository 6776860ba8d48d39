"""Pairs for timing at real sizes without real weights: random weights, with the acceptance rate imposed by the heads.

Random models soon repeat themselves, and then every draft is accepted. Here the target's head predicts the next token
on a single cycle through the whole vocabulary, so that nothing is repeated before the vocabulary is used up. The
draft's head predicts the same successor for a share α of the tokens, and with the same certainty a wrong one for the
others. Such a pair runs unchanged on every engine and with every way of decoding, greedy or sampling.

Limits: acceptance is independent from token to token, and the draft is just as confident where it is wrong, so rules
that stop a draft by its confidence gain nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.bench.settings import BenchError
from hf_specdec.compat.transformers_private import mark_initialized
from hf_specdec.embedded.tokenization import VOCAB_SIZE

PREFIX = "synthetic:"

_TINY = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}  # fmt: skip
_ROPE = "rope_parameters"

# As in the published configurations, except the contexts of SmolLM and TinyLlama: the original 2048 leaves no room for
# an answer to a prompt of 2048 tokens. The tiny shapes are for tests and for trying out commands; larger initial
# weights give their layers as much influence as at real sizes.
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

# The modules of each layer that write to the residual stream.
OUTPUT_PROJECTIONS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen2": ("self_attn.o_proj", "mlp.down_proj"),
    "opt": ("self_attn.out_proj", "fc2"),
    "falcon_h1": ("self_attn.o_proj", "mamba.out_proj", "feed_forward.down_proj"),
}

# The successor's logit above the mean, in nats: with a vocabulary of 152k it leaves 1e-4 of the mass to the others.
_PEAK = 20.0
# Scales what layers write to the residual stream, so that the last token's embedding stays recognizable.
_WRITES = 0.1
# Odd, so that no two rows of a matrix are equal.
_NUMBERS = 2**20 + 1


@dataclass(frozen=True)
class Spec:
    """The parts of a name such as `synthetic:smollm-135m:alpha=0.7:draft=128x2`.

    Args:
        shape: a key of `SHAPES`.
        alpha: share of the tokens for which target and draft predict the same successor.
        width: the draft's hidden size.
        layers: the draft's depth.
    """

    shape: str
    alpha: float
    width: int
    layers: int


def is_synthetic(name: str) -> bool:
    """Whether a model's name asks for a synthetic pair."""
    return name.startswith(PREFIX)


def parse(name: str) -> Spec:
    """Parse the name of a pair: `synthetic:SHAPE[:alpha=A][:draft=WIDTHxLAYERS | :c=C]`.

    `c` is the draft's cost, the bytes that a draft step reads over those of a target step; it determines the width of
    a draft of two layers. The defaults are α = 0.8 and c = 0.05.

    Raises:
        BenchError: an unknown shape or option, or a value out of range.
    """
    shape, *options = name.removeprefix(PREFIX).split(":")
    if shape not in SHAPES:
        raise BenchError(f"--model_name: {name!r} has no known shape; choose one of {', '.join(SHAPES)}")
    spec = Spec(shape, alpha=0.8, width=width_for_cost(shape, 0.05), layers=2)
    for option in options:
        key, _, text = option.partition("=")
        try:
            spec = replace(spec, **_READERS[key](shape, text))
        except (KeyError, ValueError) as error:
            raise BenchError(
                f"--model_name: {option!r} in {name!r} can't be used; options are alpha=0 to 1 and either "
                "draft=WIDTHxLAYERS, the width a multiple of 32 from 64 on, or c=C, of at least "
                f"{relative_cost(shape, 64):.2g} and at most 1"
            ) from error
    return spec


def _alpha(shape: str, text: str) -> dict[str, Any]:
    return {"alpha": _between(0, float(text), 1)}


def _draft(shape: str, text: str) -> dict[str, Any]:
    width, layers = (int(number) for number in text.split("x"))
    if width % 32:
        raise ValueError(width)
    return {"width": int(_between(64, width, float("inf"))), "layers": int(_between(1, layers, float("inf")))}


def _cost(shape: str, text: str) -> dict[str, Any]:
    cost = _between(0.001, float(text), 1)
    width = width_for_cost(shape, cost)
    _between(0.8 * cost, relative_cost(shape, width), 1.25 * cost)
    return {"width": width, "layers": 2}


def _between(least: float, value: float, most: float) -> float:
    if not least <= value <= most:
        raise ValueError(value)
    return value


_READERS = {"alpha": _alpha, "draft": _draft, "c": _cost}


def draft_shape(target: str, width: int, layers: int) -> dict[str, Any]:
    """A draft's configuration: the target's architecture, vocabulary and context, and an MLP of 4 × `width`.

    Attention heads have 64 (or 32) dimensions. With `width` 768 and 2 layers this is LLaMA-68M. The draft of a target
    with recurrent layers is a LLaMA.
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
    """Whether the shape has recurrent layers besides attention."""
    return "mamba_d_ssm" in shape


def width_for_cost(target: str, cost: float, layers: int = 2) -> int:
    """The width, a multiple of 32 from 64 on, at which a draft's cost is nearest to `cost`."""
    return min(range(64, 32_768, 32), key=lambda width: abs(relative_cost(target, width, layers) - cost))


def relative_cost(target: str, width: int, layers: int = 2) -> float:
    """Bytes that a step of such a draft reads over those of a target step, in the same dtype."""
    return _read_weights(draft_shape(target, width, layers)) / _read_weights(SHAPES[target])


def _read_weights(shape: Mapping[str, Any]) -> int:
    """Number of weights in the matrices that a step reads: the layers' and the head's."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = 2 * width * heads * shape.get("head_dim", width // heads)
    attention *= 1 + shape.get("num_key_value_heads", heads) / heads
    if is_hybrid(shape):
        states = 2 * shape["mamba_d_state"] + shape["mamba_n_heads"]
        attention += width * (3 * shape["mamba_d_ssm"] + states)
    inner = 2 * width * shape["ffn_dim"] if "ffn_dim" in shape else 3 * width * shape["intermediate_size"]
    return int(shape["num_hidden_layers"] * (attention + inner) + width * shape["vocab_size"])


def build(
    spec: Spec,
    device: torch.device,
    dtype: torch.dtype,
    draft_device: torch.device,
    draft_dtype: torch.dtype,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """Make the target, its draft, and a sentence that describes them, directly on their devices and in their dtypes.

    The permuted head can't be tied to the embedding. If the published model ties them, this one holds
    `vocabulary × hidden size` more weights, of which a step reads one row: the bytes read per token are the same.
    `seed` determines the cycle and the tokens on which the draft is wrong, for every dtype and device alike; the wrong
    tokens at a higher α are among those at a lower one.
    """
    shape = SHAPES[spec.shape]
    before = cycle(shape["vocab_size"], seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = _random_model(shape, before, device, dtype)
        draft = _random_model(
            draft_shape(spec.shape, spec.width, spec.layers),
            misled(before, spec.alpha, seed),
            draft_device,
            draft_dtype,
        )
    cost = relative_cost(spec.shape, spec.width, spec.layers)
    kind = "has attention only, is" if is_hybrid(shape) else "is"
    sentence = (
        f"Synthetic pair: random weights in the shape of {spec.shape}; its draft {kind} {spec.width} wide, "
        f"{spec.layers} layers deep and reads {100 * cost:.3g}% of the target's bytes a step; acceptance is imposed by "
        f"the output heads, α = {spec.alpha:g}"
    )
    return target, draft, sentence


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which real weights of these shapes are used: bfloat16, or float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def cycle(vocabulary: int, seed: int) -> Tensor:
    """Each token's predecessor on a random cycle through all tokens, `[V]`."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed))
    before = torch.empty_like(order)
    before[order.roll(-1)] = order
    return before


def misled(before: Tensor, alpha: float, seed: int) -> Tensor:
    """The predecessors `[V]` for a draft that is right about a share `alpha` of the successors.

    Wrong tokens exchange their successors among themselves, so every token still has one predecessor.
    """
    order = torch.randperm(len(before), generator=torch.Generator().manual_seed(seed + 1))
    wrong = order[: round((1 - alpha) * len(before))]
    found = before.clone()
    found[wrong] = before[wrong.roll(1)]
    return found


@torch.no_grad()
def _random_model(
    shape: Mapping[str, Any], before: Tensor, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Random layers between an embedding of ±1 and a head whose row for a token is its predecessor's embedding."""
    untied = {**shape, "tie_word_embeddings": False}
    config = AutoConfig.for_model(**untied, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    _fill_matrices(model, getattr(config, "initializer_range", None) or config.init_std)
    model.init_weights()
    for name in OUTPUT_PROJECTIONS[config.model_type]:
        for layer in model.get_decoder().layers:
            layer.get_submodule(name).weight.mul_(_WRITES)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.bernoulli_(0.5).mul_(2).sub_(1)
    torch.index_select(embedding, 0, before.to(device), out=head.data)
    # The last norm outputs vectors of length √d, so a row's product with its own embedding is d.
    head.mul_(_PEAK / head.shape[1])
    return model.eval()


def _fill_matrices(model: PreTrainedModel, std: float) -> None:
    """Fill matrices with normal numbers, repeating one million of them: drawing 7 billion would take a minute.

    The flag keeps `transformers.initialization` from drawing these tensors again.
    """
    numbers = torch.empty(_NUMBERS, dtype=model.dtype, device=model.device).normal_(std=std)
    for weight in (weight for weight in model.parameters() if weight.ndim > 1):
        for part in weight.view(-1).split(_NUMBERS):
            part.copy_(numbers[: len(part)])
        numbers = numbers.roll(-len(part))
        mark_initialized(weight)
