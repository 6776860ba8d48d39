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
    """A model whose linear layers and embedding are read from a GGUF file in every pass, on a CPU.

    Quantized weights stay as they lie in the file, which is mapped into memory, not copied, but for queries and keys of
    Llama's architecture: their rows lie in another order. Numbers are multiplied exactly as the file has them.

    Args:
        path: the file, whole.
        dtype: of activations, norms and weights that are not quantized: float32, or if all matrices of the file are
            float16 or bfloat16, these.
        config: the model's, by default as the file's metadata say.

    Raises:
        ValueError: the file is damaged, or its architecture, a type of its tensors or one of these is not known.
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
    """A model made meanwhile has its matrices on the device `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.empty and len(args[0] if isinstance(args[0], Sequence) else args) > 1:
            options = {**options, "device": "meta"}
        return func(*args, **options)


class _Blocks(HfQuantizer):
    """What transformers asks of a model with quantized weights."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self.pre_quantized = path, True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Raises ValueError: `save_pretrained` has no form for blocks."""
        raise ValueError(
            f"The weights of this model stay in {self._path}: copy that file, or call model.dequantize() first, which "
            "widens all weights, and save then."
        )

    @property
    def is_trainable(self) -> bool:
        return False

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The same model with all weights widened."""
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
    """The names of the model's weights, and of the file's tensors that they are.

    Raises:
        ValueError: a tensor has no place in such a model, or is of a type that is not known here.
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
                f"{file.path}: {name} is of type {tensor.kind}; those that can be read are "
                f"{', '.join((*BLOCKS, *PLAIN))}. Take a file of these, or load it with "
                "from_pretrained(…, gguf_file=…), which widens all weights."
            )
        places[place] = name
    return places


def _check_shapes(file: GgufFile, model: PreTrainedModel, places: Mapping[str, str]) -> None:
    wanted = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    for name, shape in wanted.items():
        stored = file.tensors.get(places.get(name, ""))
        if stored is None or stored.shape != shape:
            holds = "nothing" if stored is None else f"numbers of the shape {stored.shape}"
            raise ValueError(f"{file.path} holds {holds} for {name}, which is {shape} by the model's configuration.")
    if unknown := places.keys() - wanted.keys():
        raise ValueError(f"{file.path} holds {places[min(unknown)]}, which has no place by the model's configuration.")


def _heads_in_pairs(config: PreTrainedConfig, place: str) -> int | None:
    """Of queries and keys, how many heads; llama.cpp turns neighbours, and transformers one half with the other."""
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
    """Of each head the even rows, then the odd ones."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _plain(content: Tensor, stored: StoredTensor) -> Tensor:
    return _bytes(content, stored).view(PLAIN[stored.kind]).view(stored.shape)


def _bytes(content: Tensor, stored: StoredTensor) -> Tensor:
    return content[stored.offset : stored.offset + stored.bytes]
