"""`load_gguf`: a model of transformers whose weights stay in a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer

from hf_specdec.gguf.architectures import GEMMA, check_architecture, config_of, is_rope, place_of
from hf_specdec.gguf.file import GgufFile, StoredTensor, read
from hf_specdec.gguf.weights import GgufWeight
from hf_specdec.host.torch_state import FunctionMode

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def load_gguf(
    path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """Load a model for a CPU whose linear layers and embedding read a GGUF file in every pass.

    Quantized weights stay in the file, which is mapped into memory. Only queries and keys of Llama's architecture are
    copied, since their rows are in another order. Weights have exactly the values of the file.

    Args:
        path: the file; not one part of several.
        dtype: the dtype of activations, norms and weights that are not quantized. By default float16 or bfloat16 if all
            matrices of the file have that type, else float32.
        config: the model's configuration; by default from the file's metadata.

    Raises:
        ValueError: the file is damaged, or its architecture, a tensor or a tensor's type is not supported.
        ImportError: the package gguf is not installed.
    """
    if find_spec("gguf") is None:
        raise ImportError("load_gguf needs the package gguf; pip install 'hf_specdec[gguf]'")
    file = read(Path(path))
    architecture = check_architecture(file)
    found = config or config_of(file)
    places = _places(file, architecture, ropes=config is not None)
    if dtype is None:
        kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
        dtype = PLAIN[kinds.pop()] if len(kinds) == 1 and kinds <= PLAIN.keys() else torch.float32
    with _MatricesWithoutMemory():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(found, dtype=dtype)
    _check_shapes(file, model, places)
    content = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    for place, name in places.items():
        heads = _heads_in_pairs(found, place) if architecture == "llama" else None
        weight = _weight(content, file.tensors[name], dtype, heads)
        if architecture in GEMMA and name.endswith("norm.weight"):
            weight = (_plain(content, file.tensors[name]).float() - 1).to(dtype)
        module, _, kind = place.rpartition(".")
        setattr(model.get_submodule(module), kind, Parameter(weight, requires_grad=False))
    if found.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    model.hf_quantizer = _Blocks(path)
    return model.eval()


class _MatricesWithoutMemory(FunctionMode):
    """Create matrices on the device `meta`, so that a model made meanwhile takes no memory for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.empty and len(args[0] if isinstance(args[0], Sequence) else args) > 1:
            options = {**options, "device": "meta"}
        return func(*args, **options)


class _Blocks(HfQuantizer):
    """The quantizer that transformers expects of a model with quantized weights."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self.pre_quantized = path, True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Raise ValueError: `save_pretrained` cannot save blocks."""
        raise ValueError(
            f"The weights of this model stay in {self._path}: copy that file, or call model.dequantize(), which widens "
            "all weights, and save the result."
        )

    @property
    def is_trainable(self) -> bool:
        return False

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Widen all weights in place; returns the same model."""
        known: dict[int, Parameter] = {}
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
                if isinstance(weight, GgufWeight):
                    if id(weight) not in known:
                        known[id(weight)] = Parameter(weight.dequantize(), requires_grad=False)
                    setattr(module, name, known[id(weight)])
        del model.hf_quantizer
        return model if dtype is None else model.to(dtype)


def _places(file: GgufFile, architecture: str, *, ropes: bool) -> dict[str, str]:
    """The name of the file's tensor for each of the model's weights.

    Raises:
        ValueError: a tensor has no place in the model, or its type is not supported.
    """
    places = {}
    for name, tensor in file.tensors.items():
        place = place_of(name, architecture)
        if place is None:
            if ropes and is_rope(name):
                continue
            raise ValueError(f"{file.path} holds {name}, which has no place in a model of {architecture!r}.")
        if tensor.kind not in (PLAIN if len(tensor.shape) == 1 else (*PLAIN, *BLOCKS)):
            raise ValueError(
                f"{file.path}: {name} has type {tensor.kind}; load_gguf supports "
                f"{', '.join((*BLOCKS, *PLAIN))}. Choose a file with these types, or load it with "
                "from_pretrained(…, gguf_file=…), which widens all weights."
            )
        places[place] = name
    return places


def _check_shapes(file: GgufFile, model: PreTrainedModel, places: Mapping[str, str]) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    for name, shape in wanted.items():
        stored = file.tensors.get(places.get(name, ""))
        if stored is None or stored.shape != shape:
            holds = "nothing" if stored is None else f"a tensor of shape {stored.shape}"
            raise ValueError(f"{file.path} holds {holds} for {name}, which has shape {shape} in the model.")
    if unknown := places.keys() - wanted.keys():
        raise ValueError(f"{file.path} holds {places[min(unknown)]}, which has no place in the model's configuration.")


def _heads_in_pairs(config: PreTrainedConfig, place: str) -> int | None:
    """The heads of queries or keys, else None: llama.cpp rotates neighbours, transformers the halves of a head."""
    if ".q_proj." in place:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in place else None


def _weight(content: Tensor, stored: StoredTensor, dtype: torch.dtype, heads: int | None) -> Tensor:
    if stored.kind in PLAIN:
        plain = _plain(content, stored).to(dtype)
        return plain if heads is None else _in_halves(plain, heads)
    blocks = _bytes(content, stored).view(stored.shape[0], -1, stored.block[1])
    return GgufWeight(blocks if heads is None else _in_halves(blocks, heads), stored.kind, dtype)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: the even ones first, then the odd ones."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _plain(content: Tensor, stored: StoredTensor) -> Tensor:
    return _bytes(content, stored).view(PLAIN[stored.kind]).view(stored.shape)


def _bytes(content: Tensor, stored: StoredTensor) -> Tensor:
    return content[stored.offset : stored.offset + stored.bytes]
