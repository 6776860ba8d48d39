"""Tiny random targets with drafters of their own, which transformers loads from checkpoints."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel, modeling_layers

from helpers.models import llama
from helpers.patches import returned
from hf_specdec.compat.mtp_private import FIRST_VERSION
from hf_specdec.drafting.drafter import DraftProposal
from hf_specdec.drafting.own_drafter import OwnDrafter

TOO_OLD = Version(transformers.__version__).release < Version(FIRST_VERSION).release
needs_own_drafters = pytest.mark.skipif(TOO_OLD, reason=f"transformers {FIRST_VERSION} has the first such drafters")
VOCABULARY = 8
EOS, PAD = 1, 0
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS,
    "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
# By class: its configuration's, and fields of that. Those of the last two have no layers of their own in transformers,
# which makes them of any decoder's where a configuration names them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", DEEPSEEK),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", ROUTED),
    "MellumForCausalLM": ("MellumConfig", {**SLIDING, **EXPERTS}),
    "Step3p7ForConditionalGeneration": ("Step3p7Config", {**SLIDING, "mlp_layer_types": ["dense", "sparse"]}),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", DELTA),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", DELTA),
}
SEVERAL = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Step3p7ForConditionalGeneration", "Qwen3NextForCausalLM")


def texts(rows: int, padded: bool = True) -> dict[str, Tensor]:
    """Random prompts of nine tokens, the second of them with three of padding."""
    ids = torch.randint(2, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        ids[1, :3], mask[1, :3] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def proposals_by_length(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Fills up, for the rest of a test, with what is proposed for the first row, by the length of its text."""
    found: dict[int, list[int]] = {}

    def note(made: DraftProposal, self: OwnDrafter, ids: Tensor, lengths: list[int], room: Any) -> None:
        if made.lengths[0]:
            found[lengths[0]] = made.tokens[0, : made.lengths[0]].tolist()

    returned(monkeypatch, OwnDrafter, "propose", note)
    return found


def target_with_mtp(family: str, layers: int, seed: int = 0, **other: Any) -> tuple[PreTrainedModel, Any]:
    """A tiny random target in float64, and its multi-token-prediction layers."""
    kind, fields = FAMILIES[family]
    fields = {**COMMON, **fields, **other}
    if "layer_types" in fields:
        fields |= {"mtp_layer_types": [fields["layer_types"][-1]] * layers}
        fields |= {"mtp_mlp_layer_types": ["dense"] * layers}
    if family.startswith("Step3p7"):
        fields = {"text_config": {**fields, "num_local_experts": 4}, "vision_config": SMALL_VISION}
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**fields)
    config.get_text_config().num_mtp_layers = layers
    model = getattr(transformers, family)(config).eval().double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others don't compute in float64
    mtp = modeling_layers.MtpModel(model, layers)
    for weight in mtp.layers.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    mtp.layers.double()
    return model, mtp.eval()


def llama_with_mtp(monkeypatch: pytest.MonkeyPatch, device: torch.device | str = "cpu") -> PreTrainedModel:
    """A tiny random Llama in float64 with two multi-token-prediction layers; it has no experts, unlike the others."""
    model = llama(seed=1, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_mtp_layers=2).to(device)
    torch.manual_seed(3)
    mtp = modeling_layers.MtpModel(model, 2)
    mtp.layers.to(device, torch.float64)
    lend(monkeypatch, model, mtp.eval())
    return model


def lend(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, mtp: Any) -> None:
    """Have transformers load these layers for this target, instead of reading a checkpoint."""

    def loaded(target: PreTrainedModel, device_map: Any = None) -> Any:
        assert target is model
        return mtp

    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", loaded)


BLOCK_TARGETS = ("LlamaForCausalLM", "MuseGlimmerForConditionalGeneration")


def target_and_block_draft(
    family: str = "LlamaForCausalLM", seed: int = 0, **other: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny random target in float64, and a DFlash draft that makes up to four tokens at once."""
    torch.manual_seed(seed)
    config = getattr(
        transformers, family.replace("ForCausalLM", "Config").replace("ForConditionalGeneration", "Config")
    )
    fields = {**COMMON, **other}
    if family.startswith("Muse"):
        fields = {"text_config": {**fields, "sliding_window": 6}, "vision_config": SMALL_VISION}
    return getattr(transformers, family)(config(**fields)).eval().double(), block_draft(**other)


def block_draft(**fields: Any) -> PreTrainedModel:
    """A tiny random DFlash draft, without an embedding and a head of its own."""
    own = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 1], "sliding_window": 6}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    draft = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(**{**COMMON, **own, **kinds, **fields})
    )
    for weight in draft.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return draft.eval().double()


def target_and_assistant(
    monkeypatch: pytest.MonkeyPatch, window: int = 6, seed: int = 0
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny random Gemma 4 in float64, and an assistant that reads its keys.

    transformers 5.23 and 5.24 can't make an assistant, all of whose layers share keys, which is put right here.
    """
    text = transformers.Gemma4TextConfig
    if (modes := getattr(text, "kv_sharing_modes", None)) is not None:
        monkeypatch.setattr(
            text,
            "kv_sharing_modes",
            property(
                lambda self: (
                    ["reuse"] * self.num_hidden_layers
                    if self.num_kv_shared_layers == self.num_hidden_layers
                    else modes.fget(self)
                )
            ),
        )
    torch.manual_seed(seed)
    shared = {"sliding_window": window, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kinds, sizes = ["sliding_attention", "full_attention"], {**COMMON, **shared, "global_head_dim": 8}
    del sizes["moe_intermediate_size"]
    layers = {"num_hidden_layers": 4, "layer_types": kinds * 2, "num_kv_shared_layers": 2}
    by_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    config = text(**{**sizes, **layers, **by_layer})
    own = text(**{**sizes, "layer_types": kinds, "num_kv_shared_layers": 2, "hidden_size": 16})
    target = transformers.Gemma4ForCausalLM(config)
    draft = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(text_config=own, backbone_hidden_size=32, tie_word_embeddings=False)
    )
    for model in (target, draft):
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                torch.nn.init.normal_(weight, std=0.3)
    return target.eval().double(), draft.eval().double()
