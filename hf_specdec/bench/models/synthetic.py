"""Pairs for timing at real sizes without real weights: a random target, and its own first layers as the draft.

Layers of the target beyond the draft's write to the residual stream through projections scaled by ε, so that the
draft nearly knows the target's answer: timings are those of the shape, acceptance is set by ε, texts mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.bench.settings import BenchError
from hf_specdec.embedded.tokenization import VOCAB_SIZE

PREFIX = "synthetic:"

# As the published configurations have them; the tiny ones are for tests and for trying a command out. Their wider
# initial weights give tokens as much weight as the layers of real sizes do.
_TINY = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "qwen2-7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "opt-6.7b": {
        "model_type": "opt", "vocab_size": 50_272, "hidden_size": 4096, "ffn_dim": 16_384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "tiny-llama": {"model_type": "llama", "intermediate_size": 128, "initializer_range": 0.2, **_TINY},
    "tiny-qwen2": {
        "model_type": "qwen2", "intermediate_size": 128, "initializer_range": 0.2, "num_key_value_heads": 2, **_TINY,
    },
    "tiny-opt": {"model_type": "opt", "ffn_dim": 128, "init_std": 0.2, "tie_word_embeddings": False, **_TINY},
}  # fmt: skip

# What writes to the residual stream in each layer.
_OUTPUT_PROJECTIONS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "qwen2": ("self_attn.o_proj", "mlp.down_proj"),
    "opt": ("self_attn.out_proj", "fc2"),
}
_CALIBRATION_TOKENS = 512
_CALIBRATION_STEPS = 12


@dataclass(frozen=True)
class Spec:
    """What a name such as `synthetic:llama-2-7b:layers=2:epsilon=0.02` asks for.

    Args:
        shape: a key of `SHAPES`.
        layers: how many of the target's layers the draft has.
        epsilon: factor on the output projections of the target's other layers; None finds the one that gives `alpha`.
        alpha: share of positions at which target and draft have the same argmax, where ε is to be found.
    """

    shape: str
    layers: int = 2
    epsilon: float | None = None
    alpha: float = 0.8


def is_synthetic(name: str) -> bool:
    """Whether a model's name asks for a synthetic pair."""
    return name.startswith(PREFIX)


def parse(name: str) -> Spec:
    """The pair that a name asks for: `synthetic:SHAPE[:layers=N][:epsilon=E | :alpha=A]`.

    Raises:
        BenchError: an unknown shape or option, or a value out of range.
    """
    shape, *options = name.removeprefix(PREFIX).split(":")
    if shape not in SHAPES:
        raise BenchError(f"--model_name: {name!r} has no known shape; choose one of {', '.join(SHAPES)}")
    spec, deepest = Spec(shape), SHAPES[shape]["num_hidden_layers"]
    for option in options:
        key, _, text = option.partition("=")
        try:
            value = {"layers": int, "epsilon": float, "alpha": float}[key](text)
        except (KeyError, ValueError):
            value = None
        good = value is not None and (1 <= value < deepest if key == "layers" else 0 <= value <= 1)
        if not good:
            raise BenchError(
                f"--model_name: {option!r} in {name!r} can't be used; options are layers=1 to {deepest - 1}, "
                "epsilon=0 to 1, alpha=0 to 1"
            )
        spec = replace(spec, **{key: value})
    return spec


def build(
    spec: Spec,
    device: torch.device,
    dtype: torch.dtype,
    draft_device: torch.device,
    draft_dtype: torch.dtype,
    seed: int = 0,
) -> tuple[PreTrainedModel, PreTrainedModel, str]:
    """The target, its draft, and a sentence that says what they are; made where and as what they will be used.

    The draft holds copies, so that its passes don't bring the target's weights into a processor's cache.
    """
    torch.manual_seed(seed)
    target = _random_model(SHAPES[spec.shape], device, dtype)
    draft = _random_model({**SHAPES[spec.shape], "num_hidden_layers": spec.layers}, draft_device, draft_dtype)
    values = target.state_dict()
    draft.load_state_dict({name: values[name] for name in draft.state_dict()})
    epsilon, how = spec.epsilon, ""
    if epsilon is None:
        epsilon, how = _calibrated(target, draft, spec), f", found for α = {spec.alpha:g} in greedy decoding"
    else:
        _scale(_damped(target, spec.layers), epsilon)
    sentence = (
        f"Synthetic pair: random weights in the shape of {spec.shape}; its draft is its first {spec.layers} layers, "
        f"the others are scaled by ε = {epsilon:.4g}{how}"
    )
    return target, draft, sentence


def default_dtype(device: torch.device) -> torch.dtype:
    """What real weights of these shapes are used in: bfloat16, but float32 on a CPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _random_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _damped(target: PreTrainedModel, layers: int) -> list[Tensor]:
    """The parameters that ε scales: output projections, biases included, of all layers but the first `layers`."""
    names = _OUTPUT_PROJECTIONS[target.config.model_type]
    later = target.get_decoder().layers[layers:]
    return [parameter for layer in later for name in names for parameter in layer.get_submodule(name).parameters()]


@torch.no_grad()
def _scale(parameters: Sequence[Tensor], factor: float) -> None:
    for parameter in parameters:
        parameter.mul_(factor)


@torch.no_grad()
def _calibrated(target: PreTrainedModel, draft: PreTrainedModel, spec: Spec) -> float:
    """Scales the target's later layers so that both argmaxes agree on a share `spec.alpha` of random text's positions.

    Returns ε; found by bisection of its logarithm, since agreement falls as ε grows.
    """
    parameters = _damped(target, spec.layers)
    originals = [parameter.clone() for parameter in parameters]
    ids = torch.randint(0, target.config.vocab_size, (1, _CALIBRATION_TOKENS), device=target.device)
    guesses = draft(ids.to(draft.device)).logits.argmax(-1).to(ids.device)
    low, high = -16.0, 0.0  # of log2 ε
    for _ in range(_CALIBRATION_STEPS):
        middle = (low + high) / 2
        for parameter, original in zip(parameters, originals, strict=True):
            torch.mul(original, 2.0**middle, out=parameter.data)
        agreement = (target(ids).logits.argmax(-1) == guesses).float().mean().item()
        low, high = (middle, high) if agreement > spec.alpha else (low, middle)
    return 2.0**middle
