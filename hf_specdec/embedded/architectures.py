"""The six embedded models: shapes, construction with random weights, parameter counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from hf_specdec.embedded.corpus.prompts import BOS, END, PAD, SPECIAL_TOKENS
from hf_specdec.embedded.tokenization import VOCAB_SIZE

MAX_POSITIONS = 2048
_HEAD = 32  # width of an attention head


@dataclass(frozen=True)
class Shape:
    """The size of one model; `encoder_layers=0` means decoder-only."""

    hidden: int
    inner: int
    layers: int
    encoder_layers: int = 0


SHAPES: dict[str, Shape] = {
    "target": Shape(192, 512, 9),
    "draft-small": Shape(96, 256, 1),
    "draft": Shape(192, 512, 1),
    "draft-large": Shape(192, 256, 2),
    # Encoder and decoder are equally deep, since transformers sizes T5's decoder cache by the encoder's depth.
    "t5-target": Shape(160, 448, 6, encoder_layers=6),
    "t5-draft": Shape(128, 256, 1, encoder_layers=1),
}


def is_encoder_decoder(name: str) -> bool:
    """Whether the model of this name is a T5."""
    return SHAPES[name].encoder_layers > 0


def build(shape: Shape, seed: int) -> PreTrainedModel:
    """A model of this shape with random float32 weights and a matching generation config."""
    torch.manual_seed(seed)
    ids = {f"{key}_token_id": SPECIAL_TOKENS.index(token)
           for key, token in (("pad", PAD), ("bos", BOS), ("eos", END))}  # fmt: skip
    model = _build_t5(shape, ids) if shape.encoder_layers else _build_llama(shape, ids)
    model.generation_config.update(max_new_tokens=128, **ids)
    return model


def _build_llama(shape: Shape, ids: dict[str, int]) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // _HEAD,
            head_dim=_HEAD,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            **ids,
        )
    )


def _build_t5(shape: Shape, ids: dict[str, int]) -> T5ForConditionalGeneration:
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=shape.hidden,
            d_kv=_HEAD,
            d_ff=shape.inner,
            num_heads=shape.hidden // _HEAD,
            num_layers=shape.encoder_layers,
            num_decoder_layers=shape.layers,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            tie_word_embeddings=True,
            decoder_start_token_id=ids["pad_token_id"],
            **ids,
        )
    )
    model.generation_config.decoder_start_token_id = ids["pad_token_id"]
    _prime_lookups(model)
    return model


@torch.no_grad()
def _prime_lookups(model: T5ForConditionalGeneration) -> None:
    """Initialise attention so that copying from the source is easy to learn; random weights need far more steps.

    To copy, the decoder has to find its last token in the source and attend to the token after it. So one head of
    the encoder starts out attending to the previous token, another to the next one, and cross-attention starts with
    equal projections for queries and keys, which matches equal tokens.
    """
    before, after, sharp = 1, 17, 8.0  # T5's buckets for the distances -1 and +1, of 32
    encoder = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # [buckets, heads]
    decoder = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    encoder[before, 0] = encoder[after, 1 % encoder.shape[1]] = decoder[before, 0] = sharp
    for block in model.decoder.block:
        cross = block.layer[1].EncDecAttention
        cross.q.weight.copy_(0.5 * cross.k.weight)


def parameter_counts(model: PreTrainedModel) -> dict[str, int]:
    """Parameters in the layers (encoder and decoder), in the embeddings (tied ones counted once), and in total."""
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name or ".block." in name)
    embeddings = model.get_input_embeddings().weight.numel()
    return {"layers": layers, "embeddings": embeddings, "total": sum(p.numel() for p in model.parameters())}
