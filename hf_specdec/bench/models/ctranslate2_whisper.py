"""Converts Whisper from CTranslate2's format to a folder that transformers reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

_VERSION = 6
_DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16}
_ATTENTIONS = {"self_attention": "self_attn", "attention": "encoder_attn"}


def convert(raw: Path, folder: Path, sampling: Mapping[str, Any]) -> None:
    """Convert the files in `raw` to a float32 model in `folder`, with its processor and generation config."""
    found = read((raw / "model.bin").read_bytes())
    told = json.loads((raw / "config.json").read_text())
    tokenizer = WhisperTokenizer.from_pretrained(raw, pad_token="<|endoftext|>")
    ids = tokenizer.get_added_vocab()
    # The order matters: tokens after the last one are taken for timestamps.
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(ids, key=ids.__getitem__)})
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    model = WhisperForConditionalGeneration(WhisperConfig(**shape(found), **special))
    model.load_state_dict(renamed(found))
    languages = {token: number for token, number in ids.items() if number in told["lang_ids"]}
    model.generation_config = GenerationConfig(
        **special,
        max_length=model.config.max_target_positions,
        alignment_heads=told["alignment_heads"],
        suppress_tokens=told["suppress_ids"],
        begin_suppress_tokens=told["suppress_ids_begin"],
        lang_to_id=languages,
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=50,
        is_multilingual=True,
        return_timestamps=False,
        task="transcribe",  # the default, also if the language is to be detected
        **sampling,
    )
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=model.config.num_mel_bins), tokenizer).save_pretrained(folder)


def read(data: bytes) -> dict[str, Tensor]:
    """Read all variables of the file, except aliases.

    Raises:
        ValueError: the file has another version, or holds another kind of model.
    """
    place = 0

    def numbers(form: str) -> tuple[Any, ...]:
        nonlocal place
        place += struct.calcsize(f"<{form}")
        return struct.unpack_from(f"<{form}", data, place - struct.calcsize(f"<{form}"))

    def text() -> str:
        nonlocal place
        (length,) = numbers("H")
        place += length
        return data[place - length : place - 1].decode()  # a zero ends it

    (version,), kind, _, (count,) = numbers("I"), text(), numbers("I"), numbers("I")
    if (version, kind) != (_VERSION, "WhisperSpec"):
        raise ValueError(f"expected Whisper in version {_VERSION} of the format, got {kind} in version {version}")
    found = {}
    for _ in range(count):
        name, (rank,) = text(), numbers("B")
        shape, (dtype, size) = numbers(f"{rank}I"), numbers("BI")
        place += size
        found[name] = torch.frombuffer(bytearray(data[place - size : place]), dtype=_DTYPES[dtype]).reshape(shape)
    return found


def shape(read: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes for transformers' `WhisperConfig`."""

    vocabulary, width = read["decoder/embeddings/weight"].shape
    sizes = {"vocab_size": vocabulary, "d_model": width, "num_mel_bins": read["encoder/conv1/weight"].shape[1]}
    for side, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        sizes[positions] = len(read[f"{side}/position_encodings/encodings"])
        # One of the entries is layer_norm.
        sizes[f"{side}_layers"] = len({name.split("/")[1] for name in read if name.startswith(f"{side}/layer_")}) - 1
        sizes[f"{side}_attention_heads"] = int(read[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = len(read[f"{side}/layer_0/ffn/linear_0/bias"])
    return sizes


def renamed(read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A float32 state dictionary for `WhisperForConditionalGeneration`; fused projections are split."""
    found: dict[str, Tensor] = {}
    for name, tensor in read.items():
        if tensor.is_floating_point() and tensor.dim():
            found |= {f"model.{new}": part for new, part in _parts(name, tensor.float())}
    found = {name: part for name, part in found.items() if not name.endswith("k_proj.bias")}  # zeros
    return found | {"proj_out.weight": found["model.decoder.embed_tokens.weight"]}


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    path = name.replace("gamma", "weight").replace("beta", "bias").split("/")
    side, *inner, what = path
    if not inner[0].startswith("layer_") or inner[0] == "layer_norm":
        outer = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}.get(inner[0], inner[0])
        return [(f"{side}.{outer}.{what.replace('encodings', 'weight')}", tensor)]
    layer, block, module = f"{side}.layers.{inner[0].removeprefix('layer_')}", inner[1], inner[2]
    if block == "ffn":
        names = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}
        return [(f"{layer}.{names[module]}.{what}", tensor)]
    attention = _ATTENTIONS[block]
    if module == "layer_norm":
        return [(f"{layer}.{attention}_layer_norm.{what}", tensor)]
    fused = {
        "self_attention": {"linear_0": "qkv", "linear_1": "o"},
        "attention": {"linear_0": "q", "linear_1": "kv", "linear_2": "o"},
    }[block][module]
    if fused == "o":
        return [(f"{layer}.{attention}.out_proj.{what}", tensor)]
    pieces = tensor.chunk(len(fused))
    return [(f"{layer}.{attention}.{one}_proj.{what}", piece.clone()) for one, piece in zip(fused, pieces, strict=True)]
