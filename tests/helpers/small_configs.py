"""Configurations of transformers made small: each field that is a size gets a small one, whatever the family."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 64
PAD, BOS, EOS = 0, 1, 2
FIRST_SPECIAL = 40  # tokens from here on are placeholders of pictures and the like
WIDTH, LAYERS, HEADS, KEY_HEADS, HEAD_WIDTH = 32, 2, 4, 2, 8

# Field names by the size that they get.
SIZES: tuple[tuple[int, str], ...] = (
    (
        VOCABULARY,
        "vocab_size text_vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size "
        "input_vocab_size output_vocab_size codebook_vocab_size audio_vocab_size vision_vocab_size",
    ),
    (
        WIDTH,
        "hidden_size d_model n_embd embed_dim emb_dim encoder_hidden_size text_hidden_size out_hidden_size "
        "projector_hidden_size decoder_hidden_size hidden_dim projection_dim word_embed_proj_dim embedding_size "
        "cross_attention_hidden_size cross_hidden_size attention_hidden_size dim output_hidden_size "
        "input_embedding_size output_embedding_size projector_input_dim projector_output_dim projection_hidden_size "
        "vision_hidden_size vision_output_dim patch_embed_hidden_size hidden_size_global lru_width d_inner "
        "adapter_input_size audio_hidden_size image_text_hidden_size",
    ),
    (
        48,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff dff dim_ff ffn_hidden_size mlp_dim "
        "moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size dense_intermediate_size "
        "intermediate_size_mlp moe_shared_expert_intermediate_size projection_intermediate_size "
        "expert_ffn_hidden_size n_inner inner_dim moe_hidden_size feed_forward_size shared_experts_intermediate_size",
    ),
    (
        LAYERS,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers layers depth encoder_num_hidden_layers decoder_num_hidden_layers num_blocks "
        "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers resampler_depth max_window_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "cross_num_attention_heads swa_num_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads resampler_n_heads linear_num_heads index_n_heads "
        "linear_num_value_heads speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads "
        "num_sliding_attention_heads num_kv_heads",
    ),
    (
        KEY_HEADS,
        "num_key_value_heads swa_num_key_value_heads cross_num_key_value_heads kv_n_heads "
        "encoder_num_key_value_heads decoder_num_key_value_heads linear_num_key_heads num_query_groups "
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts",
    ),
    (
        HEAD_WIDTH,
        "head_dim d_kv kv_channels dim_head v_head_dim qk_rope_head_dim qk_nope_head_dim swa_head_dim "
        "cross_head_dim attention_head_size attention_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim index_head_dim resampler_head_dim d_head query_pre_attn_scalar hidden_size_per_layer_input "
        "d_rel",
    ),
    (16, "kv_lora_rank q_lora_rank o_lora_rank"),
    (
        512,
        "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions seq_len max_seq_len "
        "context_length model_max_length max_encoder_position_embeddings max_decoder_position_embeddings",
    ),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim"),
    (9, "sliding_window sliding_window_size attention_window_size"),
    (64, "expert_capacity"),
    (16, "image_size window_size mamba_d_state state_size ssm_state_size mamba_chunk_size chunk_size"),
    (4, "patch_size mm_tokens_per_image max_num_tiles conf_attention_chunk_size"),
    (1, "num_nextn_predict_layers n_group topk_group first_k_dense_replace n_groups"),
)
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
TOKENS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FILLED = ("head_dim", "num_experts_per_tok", "n_routed_experts")  # where None can stand for a size of the default
ROPE = {"rope_type": "default", "rope_theta": 1e4}
POSITIONS_IN_PICTURES = (
    *("Cosmos3Edge", "Glm4v", "Glm4vMoe", "Glm46V", "GlmImage", "GlmOcr"),
    *("PaddleOCR", "Qwen2VL", "Qwen2_5_VL"),
)
ROPE_3D = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
SHARED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
SMALL_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48,
}  # fmt: skip
BERT_DECODER = {**SMALL_BERT, "model_type": "bert", "is_decoder": True, "add_cross_attention": True}
PICTURE_WORDS = {"vocabulary_map": {"<image>": FIRST_SPECIAL}}
# Fields that depend on each other, or whose default is None, in ways of one family.
ODD: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "ChameleonConfig": PICTURE_WORDS,
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteConfig": {"num_key_value_heads": HEADS},
    "Dots3NoteTextConfig": {"num_key_value_heads": HEADS},
    "Emu3Config": PICTURE_WORDS,
    "EncoderDecoderConfig": {"encoder": {**SMALL_BERT, "model_type": "bert"}, "decoder": BERT_DECODER},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "FalconH1Config": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "Gemma3nTextConfig": {"intermediate_size": 48, "activation_sparsity_pattern": None, **SHARED},
    "Gemma4UnifiedTextConfig": SHARED,
    "Glm5NextTextConfig": {"num_key_value_heads": HEADS},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 9},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "xdrope", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
    },
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0], "num_global_layers": 1, "vision_output_dim": 2 * WIDTH},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MoonshineConfig": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "NemotronConfig": {"num_key_value_heads": KEY_HEADS},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": FIRST_SPECIAL + 20},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": FIRST_SPECIAL + 20},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds": False},
    "Step3p7TextConfig": {"sliding_window": 9},
    "VisionEncoderDecoderConfig": {
        "encoder": {**SMALL_BERT, "model_type": "vit", "image_size": 16, "patch_size": 4},
        "decoder": BERT_DECODER,
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 16},
    **{f"{name}TextConfig": {"rope_parameters": ROPE_3D} for name in POSITIONS_IN_PICTURES},
}
REPETITIVE = ("tie_word_embeddings", "scale_embedding")  # with these, a random model answers a token with itself
NEVER_SET = {"transformers_version", "architectures", "id2label", "label2id", "dtype", "problem_type"}


def small_config(kind: type[PreTrainedConfig], specials: dict[str, int] | None = None) -> PreTrainedConfig:
    """A small configuration of a kind, as a decoder where it can be one.

    Args:
        kind: its class.
        specials: the ids that placeholders have in the whole of which it is a part; None if it is the whole.
    """
    decoder = {"is_decoder": True} if specials is None else {}
    specials = {} if specials is None else specials
    default = kind()
    named = {field.name for field in dataclasses.fields(kind) if field.init}
    values = {name: value for name, value in vars(default).items() if name in named - NEVER_SET}
    layers = next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), None)
    kept = _kinds_of_layers(values, layers)
    small = {name: _small(name, value, layers, kept, specials) for name, value in values.items()}
    small = {name: value for name, value in small.items() if value is not values[name]}
    for name in LAYER_COUNTS:
        if name in small:
            small[name] = len(kept)
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = HEADS
    return kind(
        **{**small, **{name: value for name, value in decoder.items() if name in named}, **ODD.get(kind.__name__, {})}
    )


def _small(name: str, value: Any, layers: int | None, kept: Sequence[int], specials: dict[str, int]) -> Any:
    """A field's small value; the very same one where it is no size."""
    if isinstance(value, PreTrainedConfig):
        return small_config(type(value), specials)
    if value is None and name in FILLED:
        return SIZE_OF[name]
    if isinstance(value, bool) or value is None:
        return False if name in REPETITIVE else value
    if name in TOKENS:
        return TOKENS[name]
    if isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
        return specials.setdefault(name.replace("_index", "_id"), FIRST_SPECIAL + len(specials))
    if isinstance(value, int):
        return min(SIZE_OF[name], value) if name in SIZE_OF and value > 0 else value
    if isinstance(value, (list, tuple)) and layers is not None and len(value) == layers:
        return type(value)(value[at] for at in kept)
    return value


def _kinds_of_layers(values: dict[str, Any], layers: int | None) -> list[int]:
    """The layers to keep: the first of each kind, and at least `LAYERS`."""
    if layers is None:
        return []
    lists = [value for value in values.values() if isinstance(value, (list, tuple)) and len(value) == layers]
    kinds = [str([values[at] for values in lists]) for at in range(layers)]
    first: dict[str, int] = {}
    for at, kind in enumerate(kinds):
        first.setdefault(kind, at)
    chosen = sorted(first.values())
    chosen += [at for at in range(layers) if at not in chosen][: max(LAYERS - len(chosen), 0)]
    return sorted(chosen)
