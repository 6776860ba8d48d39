"""The classes that load configurations and models, for all kinds that the tasks support."""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

from hf_specdec.models.eagle_draft import Eagle3Config, Eagle3Draft
from hf_specdec.models.traits import describes_block_draft


class AnyConfig:
    """`AutoConfig`, extended to EAGLE-3 drafts, which transformers does not support."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str, **arguments: Any) -> Any:
        """Load the configuration of a folder, a GGUF file or a name on the hub."""
        kind: Any = AutoConfig
        if "gguf_file" not in arguments:
            found, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **arguments)
            kind = Eagle3Config if "speculators_model_type" in found else AutoConfig
        return kind.from_pretrained(pretrained_model_name_or_path, **arguments)


def auto_class(config: Any) -> Any:
    """The class whose `from_pretrained` loads the model of a configuration."""
    if isinstance(config, Eagle3Config):
        return Eagle3Draft
    if describes_block_draft(config):
        return AutoModel  # its head is the target's
    if config.model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return AutoModelForSpeechSeq2Seq
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
