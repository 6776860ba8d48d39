"""The six embedded models: shapes, and construction with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from hf_specdec.embedded.corpus.prompts import BOS, END, PAD, SPECIAL_TOKENS
from hf_specdec.embedded.tokenization import VOCAB_SIZE

MAX_POSITIONS = 2048
_HEAD = 32  # width of an attention head
_INITIAL_STD = 0.03  # of a T5's matrices
_SHARP = 6.0  # bias of a T5's head towards the one token that it attends to at first


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
    _prime(model)
    return model


@torch.no_grad()
def _prime(model: T5ForConditionalGeneration) -> None:
    """Initialise the weights so that translating and copying are learned within some hundred steps.

    All matrices start as small as a Llama's: T5's own embeddings start so large that its layers hardly count. The last
    norm makes up for T5's division of the decoder's output by the root of its width. To copy, the decoder has to find
    its last tokens in the source and attend to what follows. So each of the first heads starts out attending to one
    neighbour, and queries and keys of cross-attention start equal, so that similar states attend to each other.
    """
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "relative_attention_bias" not in name:
            weight.normal_(0.0, _INITIAL_STD)
    # T5's buckets, of 32: a decoder's bucket n is the distance -n; so is an encoder's, and its 16 + n the distance +n.
    for stack, neighbours in ((model.encoder, (1, 17, 2, 18)), (model.decoder, (1, 2, 3))):
        bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # [buckets, heads]
        bias.zero_()
        for head, bucket in enumerate(neighbours[: bias.shape[1] - 1]):
            bias[bucket, head] = _SHARP
    for block in model.decoder.block:
        cross = block.layer[1].EncDecAttention
        cross.q.weight.copy_(cross.k.weight)
    model.decoder.final_layer_norm.weight.fill_(model.config.d_model**0.5)
