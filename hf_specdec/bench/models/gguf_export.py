"""Writes models from memory as GGUF files, which llama.cpp reads; needs the package `gguf`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.models.trimmed_head import TrimmedHead

# Dtypes of matrices; vectors (norms, biases) stay in float32, as in llama.cpp's own converter.
_FORMATS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def export_refusal(model: PreTrainedModel) -> str | None:
    """A sentence on why a model cannot be written; None if it can."""
    config = model.config
    if config.model_type not in _ARCHITECTURES:
        return f"llama.cpp is run with the families {', '.join(_ARCHITECTURES)}, not with {config.model_type}."
    if config.rope_parameters["rope_type"] != "default":
        return f"llama.cpp is run with plain rotary embeddings, not with {config.rope_parameters['rope_type']!r} ones."
    if getattr(config, "use_sliding_window", False):
        return "llama.cpp is run with models without a sliding window."
    head = model.get_output_embeddings()
    if isinstance(head, TrimmedHead) and not head.tied:
        return "llama.cpp is run with models with a full head: restore() it first."
    return None


def write_gguf(model: PreTrainedModel, path: Path, weights: str, tokenizer: Path | None = None) -> None:
    """Write a model, with its full head even if that is trimmed, copying one tensor at a time.

    Args:
        weights: f32, bf16 or q8_0 (blocks of 32 int8 with a scale each).
        tokenizer: a GGUF file whose tokenizer is copied; None for no tokenizer.

    Raises:
        ValueError: a model that `export_refusal` refuses, or that has a tensor unknown to llama.cpp.
    """
    if refusal := export_refusal(model):
        raise ValueError(refusal)
    matrices, file_type = _FORMATS[weights]
    architecture = _ARCHITECTURES[model.config.model_type]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(file_type)
    if tokenizer is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _copy_tokenizer(writer, tokenizer)
    add_sizes(writer, model)
    trimmed = model.get_output_embeddings()
    rows = id(trimmed.weight) if isinstance(trimmed, TrimmedHead) else None  # of the embedding, which is written
    parameters = {name: one for name, one in model.named_parameters() if id(one) != rows}
    kinds = {name: matrices if one.ndim > 1 else GGMLQuantizationType.F32 for name, one in parameters.items()}
    for name, parameter in parameters.items():
        kind, known_as = kinds[name], names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known_as is None:
            raise ValueError(f"llama.cpp has no tensor {name!r} in the family {model.config.model_type}")
        shape = gguf.quant_shape_to_byte_shape(tuple(parameter.shape), kind)
        writer.add_tensor_info(known_as, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, parameter in parameters.items():
        array = _as_llama_cpp_has_it(model, name, parameter).float().cpu().numpy()
        writer.write_tensor_data(gguf.quantize(array, kinds[name]))
    writer.close()


def _copy_tokenizer(writer: GGUFWriter, file: Path) -> None:
    for name, field in gguf.GGUFReader(file).fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1] if inner else None)


def add_sizes(writer: GGUFWriter, model: PreTrainedModel) -> None:
    """Add the model's sizes and hyperparameters to the file."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _as_llama_cpp_has_it(model: PreTrainedModel, name: str, parameter: Tensor) -> Tensor:
    """A weight in llama.cpp's layout; quantized weights are widened.

    The rows of LLaMA's queries and keys are permuted from transformers' rotary layout (halves) to llama.cpp's (pairs),
    as by `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    config, detached = model.config, parameter.detach().dequantize()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if config.model_type != "llama" or projection not in heads:
        return detached
    return detached.unflatten(0, (heads[projection], 2, -1)).transpose(1, 2).reshape(parameter.shape)
