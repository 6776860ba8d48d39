"""Better Transformer: attention through torch's `scaled_dot_product_attention` (SDPA).

transformers supports this for most models, and its own switch is used for them. It lacks it for BLOOM, whose attention
modules get a subclass here, so that weights, names and the output of `save_pretrained` don't change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from hf_specdec.compat.accelerate_private import change_class
from hf_specdec.compat.transformers_private import attention_name, can_set_attention, supports_sdpa
from hf_specdec.models.traits import wrapped_model


class BloomSdpaAttention(BloomAttention):
    """BLOOM's attention through SDPA, with the same weights; results differ only by rounding.

    ALiBi (Press et al. 2022, arXiv 2108.12409) enters as part of the additive mask.
    """

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """`BloomAttention.forward` without attention weights.

        Args:
            hidden_states, residual: `[B, Q, D]`.
            alibi: `[B * H, 1, K]`.
            attention_mask: `[B, 1, Q, K]`, additive; None masks nothing.
            layer_past: the cache, updated with this pass's keys and values.
            output_attentions: return the weights `[B, H, Q, K]`, which only eager attention computes.
        """
        if output_attentions or (self.pretraining_tp > 1 and self.slow_but_exact):
            return super().forward(
                hidden_states, residual, alibi, attention_mask, layer_past, use_cache, output_attentions, **kwargs
            )
        batch_size, queries, _ = hidden_states.shape
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        bias = alibi.view(batch_size, self.num_heads, 1, -1)
        if attention_mask is not None:
            bias = bias + attention_mask
        if bias.dtype != query.dtype:
            # Under autocast the mask's lowest number would become -inf in the narrower dtype, and masked rows NaN.
            bias = bias.to(query.dtype).clamp(min=torch.finfo(query.dtype).min)
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias.expand(-1, -1, queries, -1),
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            scale=self.inv_norm_factor,
        )
        output = self.dense(context.transpose(1, 2).reshape(batch_size, queries, -1))
        return dropout_add(output, residual, self.hidden_dropout, self.training), None


def to_better_transformer(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model's attention to SDPA, in place; `to_eager_attention` undoes it.

    Args:
        model: a target or a draft, possibly wrapped by PEFT.

    Returns:
        The same model.

    Raises:
        ValueError: neither transformers nor this package has SDPA for the model; see `better_transformer_refusal`.
    """
    refusal = better_transformer_refusal(model)
    if refusal is not None:
        raise ValueError(refusal)
    if _bloom_attentions(model):
        _set_class(model, BloomSdpaAttention)
    elif attention_of(model) != "sdpa":
        _set_attention(model, "sdpa")
    return model


def to_eager_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model's attention to transformers' eager one, in place: the baseline for Better Transformer.

    Returns:
        The same model.

    Raises:
        ValueError: the model was loaded with another attention and cannot change it.
    """
    _set_class(model, BloomAttention)
    _set_attention(model, "eager")
    if attention_of(model) != "eager":
        raise ValueError(
            f"{type(wrapped_model(model)).__name__} can't change its attention {attention_of(model)!r} after loading: "
            "load it with attn_implementation='eager'."
        )
    return model


def better_transformer_refusal(model: PreTrainedModel) -> str | None:
    """A sentence on why `to_better_transformer` cannot be applied to a model, with the way out; None if it can."""
    name, parts = type(wrapped_model(model)).__name__, _parts(model)
    # First: transformers 5.17 loads Gemma 2 with SDPA, which ignores the cap.
    caps = {getattr(part.config, "attn_logit_softcapping", None) for part in parts} - {None}
    if caps:
        return (
            f"{name} has no Better Transformer: SDPA can't cap attention scores (attn_logit_softcapping={caps.pop()}); "
            "leave better_transformer out for this model."
        )
    if attention_of(model) == "sdpa" or _bloom_attentions(model):
        return None
    without = sorted({type(part).__name__ for part in parts if not supports_sdpa(part)})
    if without:
        return (
            f"{name} has no Better Transformer: transformers has no SDPA attention for {', '.join(without)}, and "
            "hf_specdec adds it for BLOOM only; leave better_transformer out for this model."
        )
    if not all(can_set_attention(part) for part in parts):
        return (
            f"{name} can't change its attention {attention_of(model)!r} after loading: load it with "
            "attn_implementation='sdpa'."
        )
    return None


def attention_of(model: PreTrainedModel) -> str:
    """The model's attention implementation by transformers' name: "sdpa", "eager" or another."""
    own = _bloom_attentions(model)
    if own and all(isinstance(module, BloomSdpaAttention) for module in own):
        return "sdpa"
    return attention_name(wrapped_model(model).config)


def _parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model and its submodels, such as an encoder and a decoder."""
    return [module for module in wrapped_model(model).modules() if isinstance(module, PreTrainedModel)]


def _set_attention(model: PreTrainedModel, attention: str) -> None:
    # transformers 5.17 doesn't pass the change on to parts with their own config of the same class, such as T5's.
    for part in _parts(model):
        if attention_name(part.config) != attention:
            part.set_attn_implementation(attention)


def _bloom_attentions(model: PreTrainedModel) -> list[BloomAttention]:
    """BLOOM's attention modules, but not other subclasses (remote code), which may compute something else."""
    return [module for module in model.modules() if type(module) in (BloomAttention, BloomSdpaAttention)]


def _set_class(model: PreTrainedModel, attention: type[BloomAttention]) -> None:
    for module in _bloom_attentions(model):
        change_class(module, attention)
