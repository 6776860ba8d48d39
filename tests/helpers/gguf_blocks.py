"""Tiny models whose matrices are random blocks of GGUF files, and ordinary models of the same numbers."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.bench.models.gguf_export import add_sizes
from hf_specdec.gguf.architectures import GEMMA, MODEL_TYPES

# Where blocks of each type have floats of 16 bits.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
SIZES = {
    "vocab_size": 48, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 9},
    "gemma3": {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 9, "num_hidden_layers": 6},
    "phi3": {"sliding_window": 9},
}


def random_blocks(rows: int, columns: int, kind: str, seed: int) -> np.ndarray:
    """Rows of bytes, which stand for numbers of about 0.1."""
    generator = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (rows, columns // numbers, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scale = {"Q8_0": 256, "Q4_K": 2048, "Q5_K": 4096, "Q6_K": 16384}.get(kind, 32)
        drawn = generator.uniform(0.2, 1, blocks.shape[:2]) / scale * (-8 if at == 2 and "_1" in kind else 1)
        blocks[..., at : at + 2] = drawn.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def widened(blocks: np.ndarray, kind: str) -> Tensor:
    """The numbers, by the package gguf."""
    return torch.from_numpy(gguf.dequantize(blocks, GGMLQuantizationType[kind]))


def write_blocks(
    path: Path, architecture: str, kinds: Sequence[str] = ("Q4_0",), seed: int = 0, **sizes: Any
) -> PreTrainedModel:
    """Writes a file whose matrices are of these types in turn; returns the model in float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(MODEL_TYPES[architecture], **{**SIZES, **OWN.get(architecture, {}), **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    writer = GGUFWriter(path, architecture)
    add_metadata(writer, model, architecture)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    turn = cycle(kinds)
    for at, (name, weight) in enumerate(model.named_parameters()):
        stored = names.get_name(name, (".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        heads = heads if architecture == "llama" else None
        kind = next(turn) if weight.dim() > 1 else "F32"
        if kind in HALVES:
            blocks = random_blocks(*weight.shape, kind, seed + at)
            writer.add_tensor(stored, blocks, raw_dtype=GGMLQuantizationType[kind])
            numbers = widened(blocks, kind)
        else:
            more = float(architecture in GEMMA and name.endswith("norm.weight"))
            raw = gguf.quantize((torch.randn(weight.shape) / 8 + more).numpy(), GGMLQuantizationType[kind])
            writer.add_tensor(stored, raw, raw_dtype=GGMLQuantizationType[kind])
            numbers = widened(raw, kind) - more
        # Files of Llama's architecture have the two halves of a head's rows in turn.
        weight.data = numbers if heads is None else numbers.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_metadata(writer: GGUFWriter, model: PreTrainedModel, architecture: str) -> None:
    """What a file tells of a model beside its weights."""
    config = model.config
    add_sizes(writer, model)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
