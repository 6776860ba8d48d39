"""EAGLE-3 drafts as the `speculators` library stores them (Li et al. 2025, arXiv 2503.01840).

At each position, a draft reads the next token and hidden states of some target layers, which a linear layer fuses. Its
layers are ordinary layers of transformers; only the first reads both, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList
from transformers import MODEL_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_specdec.compat.transformers_private import share_attention
from hf_specdec.models.cache_names import CACHE_NAME
from hf_specdec.models.trimmed_head import among_all

FORMAT = "eagle3"
LAYERS = ("llama", "qwen3")  # model types that the layers can have
FEATURES = 3  # the number of target layers that are read if the configuration names none


class Eagle3Config(PreTrainedConfig):
    """The configuration of an EAGLE-3 draft, with the format's names.

    Args:
        transformer_layer_config: the configuration of the layers, for Llama or Qwen 3, or its fields. Its `vocab_size`
            is the target's.
        draft_vocab_size: the number of tokens that can be drafted; None for all.
        eagle_aux_hidden_state_layer_ids: the target layers whose input is read; None for the third, the middle one and
            the third last.
        target_hidden_size: the width of that input; None for the draft's width.
        norm_before_residual: whether the residual stream starts after the norm.
        norm_before_fc, fc_norm: whether the states are normalized before they are fused, together or layer by layer.
        norm_output: whether later draft steps read normalized states.
        speculators_config: holds, among others, the number of tokens that the draft was trained to propose.
        speculators_model_type: `"eagle3"`.
    """

    model_type = "speculator_model"

    def __init__(
        self,
        transformer_layer_config: PreTrainedConfig | Mapping[str, Any] | None = None,
        draft_vocab_size: int | None = None,
        eagle_aux_hidden_state_layer_ids: list[int] | None = None,
        target_hidden_size: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        speculators_config: Mapping[str, Any] | None = None,
        speculators_model_type: str = FORMAT,
        **others: Any,
    ) -> None:
        layers = transformer_layer_config
        if not isinstance(layers, PreTrainedConfig):
            layers = AutoConfig.for_model(**{"model_type": "llama", **(layers or {})})
        self.transformer_layer_config = layers
        self.vocab_size = layers.vocab_size
        self.draft_vocab_size = draft_vocab_size or layers.vocab_size
        self.eagle_aux_hidden_state_layer_ids = eagle_aux_hidden_state_layer_ids
        self.target_hidden_size = target_hidden_size or layers.hidden_size
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        self.norm_before_fc, self.fc_norm = norm_before_fc, fc_norm
        self.speculators_config = speculators_config
        self.speculators_model_type = speculators_model_type
        super().__init__(**{**others, "vocab_size": layers.vocab_size})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **others: Any) -> Any:
        """Create the configuration from its fields, as in transformers.

        Raises:
            ValueError: the format or the model type of the layers is not supported.
        """
        kind = config_dict.get("speculators_model_type")
        if kind != FORMAT:
            raise ValueError(
                f"speculators_model_type={kind!r} in the draft's config.json: Eagle3Draft supports {FORMAT!r}; convert "
                "the checkpoint with the speculators library, or choose another draft."
            )
        layers = (config_dict.get("transformer_layer_config") or {}).get("model_type", "llama")
        if layers not in LAYERS:
            raise ValueError(
                f"transformer_layer_config of model_type={layers!r} in the draft's config.json: Eagle3Draft "
                f"supports {' and '.join(map(repr, LAYERS))}; choose another draft."
            )
        return super().from_dict(config_dict, **others)


class Eagle3Draft(PreTrainedModel):
    """An EAGLE-3 draft: `Eagle3Draft.from_pretrained(name)`, to be passed as `assistant_model`.

    It needs the target to draft, and has no `generate`.
    """

    config_class = Eagle3Config
    _supports_sdpa = True
    # Weights that only training needs, and the inverse of `d2t`.
    _keys_to_ignore_on_load_unexpected = (r"^t2d$", r"^verifier_", r"^rotary_emb\.")

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        layers: Any = config.transformer_layer_config
        share_attention(config, layers)
        body, width = MODEL_MAPPING[type(layers)](layers), layers.hidden_size
        features = len(config.eagle_aux_hidden_state_layer_ids or range(FEATURES))
        self.embed_tokens, self.layers, self.norm, self.rotary_emb = (
            getattr(body, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")
        )
        first = self.layers[0]
        first.hidden_norm = deepcopy(first.input_layernorm)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            setattr(first.self_attn, name, Linear(2 * width, narrow.out_features, bias=narrow.bias is not None))
        norm, sizes = type(self.norm), [config.target_hidden_size] * features
        self.input_norm = norm(sum(sizes), eps=layers.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = ModuleList(norm(n, eps=layers.rms_norm_eps) for n in sizes) if config.fc_norm else None
        self.fc = Linear(sum(sizes), width, bias=False)
        self.lm_head = Linear(width, config.draft_vocab_size, bias=False)
        shared = config.draft_vocab_size == config.vocab_size
        self.register_buffer("d2t", None if shared else torch.zeros(config.draft_vocab_size, dtype=torch.long))
        methods = (config.speculators_config or {}).get("proposal_methods") or [{}]
        self.generation_config = GenerationConfig(num_assistant_tokens=methods[0].get("speculative_tokens"))
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *arguments: Any, output_loading_info: bool = False, **named: Any
    ) -> Any:
        """Load a draft from a folder or by its name on the hub, as in transformers.

        Raises:
            ValueError: the format is not supported, weights are missing or unknown, or `d2t` is invalid.
        """
        name = pretrained_model_name_or_path
        draft, info = super().from_pretrained(name, *arguments, output_loading_info=True, **named)
        missing = set(info["missing_keys"])
        if "embed_tokens.weight" in missing:
            draft.embed_tokens = None  # the target's is used
        wrong = {*missing, *info["unexpected_keys"]} - {"embed_tokens.weight"}
        if wrong:
            raise ValueError(
                f"{str(name)!r} is not a whole EAGLE-3 draft of the speculators format: {', '.join(sorted(wrong))} of "
                "its weights are missing or unknown; fetch it again, or choose another draft."
            )
        if draft.d2t is not None and not draft._maps_to_vocabulary():
            raise ValueError(
                f"{str(name)!r}: d2t does not map its {draft.config.draft_vocab_size} tokens to different ones of "
                f"{draft.config.vocab_size}; fetch it again, or choose another draft."
            )
        return (draft, info) if output_loading_info else draft

    def _maps_to_vocabulary(self) -> bool:
        """Whether `d2t` maps the draft's tokens to different tokens of the target."""
        tokens = self._tokens().tolist()
        return len(set(tokens)) == len(tokens) and min(tokens) >= 0 and max(tokens) < self.config.vocab_size

    def fused(self, states: Tensor) -> Tensor:
        """Fuse the target's hidden states, side by side `[B, k, n · target H]`, to `[B, k, H]`."""
        states = states.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(states)
        return fused

    def forward(
        self,
        inputs_embeds: Tensor,
        states: Tensor,
        masks: Mapping[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Run the layers on tokens and the hidden states before them.

        Args:
            inputs_embeds, states: `[B, k, H]`; states are from `fused`, or returned by an earlier call.
            masks: additive masks `[B, 1, k, span]` by kind of layer; None for causal ones.
            position_ids: `[B, k]`; None counts from 0.
            cache: the cache of all layers.

        Returns:
            `[B, k, H]`, for `logits` and as `states` of later calls.
        """
        if position_ids is None:
            position_ids = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        rotated = self.rotary_emb(inputs_embeds, position_ids)
        kinds = getattr(self.config.transformer_layer_config, "layer_types", None)
        for at, layer in enumerate(self.layers):
            mask = None if masks is None else masks[kinds[at] if kinds is not None else "full_attention"]
            given = {"attention_mask": mask, "position_embeddings": rotated, CACHE_NAME: cache}
            states = layer(states, **given) if at else self._first(inputs_embeds, states, given)
        if self.config.norm_output:
            states = self.norm(states)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` of states `[..., H]`; -inf for tokens that cannot be drafted."""
        found: Tensor = self.lm_head(states if self.config.norm_output else self.norm(states))
        return found if self.d2t is None else among_all(found, self._tokens(), self.config.vocab_size)

    def _first(self, embedded: Tensor, states: Tensor, given: Mapping[str, Any]) -> Tensor:
        layer = self.layers[0]
        normed = layer.hidden_norm(states)
        seen, _ = layer.self_attn(torch.cat([layer.input_layernorm(embedded), normed], dim=-1), **given)
        states = (normed if self.config.norm_before_residual else states) + seen
        found: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
        return found

    def _tokens(self) -> Tensor:
        """`[K]`: the target's ids of the tokens that can be drafted."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
