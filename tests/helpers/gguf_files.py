"""Tiny models as GGUF files with their tokenizer and chat template, as llama.cpp's converter writes them."""

import json
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hf_specdec.bench.models.gguf_export import add_sizes

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def qwen2(vocabulary: int, seed: int = 0) -> PreTrainedModel:
    """A target of a family whose weights GGUF files hold as transformers has them."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=vocabulary, num_key_value_heads=2, max_position_embeddings=160, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, **shape,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    template: str = TEMPLATE,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> None:
    """Writes weights, those of vectors in float32, sizes and a byte-level BPE tokenizer."""
    config, writer = model.config, GGUFWriter(path, "qwen2")
    add_sizes(writer, model)
    tokens = [tokenizer.convert_ids_to_tokens(number) for number in range(config.vocab_size)]
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        kind = matrices if parameter.dim() > 1 else GGMLQuantizationType.F32
        numbers = gguf.quantize(parameter.detach().float().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
