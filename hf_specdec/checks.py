"""What is refused before the first decoder pass: each by the argument, its value and the way out."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.cache import check_rewindable, is_static_by_request
from hf_specdec.cross_tokenizer import tokenizers_disagree
from hf_specdec.processors import check_stateless

MAX_VOCABULARY_PADDING = 1024


def check_call(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse what speculation can't do with a target.

    Raises:
        ValueError: names the argument, its value and the way out.
    """
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={generation_config.num_beams}: speculation decodes one sequence per row, so set num_beams=1, "
            "or generation_strategy=None for beam search."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            raise ValueError(
                f"{name}=True: a round's passes cover several tokens and drop some, so there is no such output per "
                f"token; leave {name} out, or set generation_strategy=None."
            )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: a draft can't read another model's embeddings, so pass input_ids instead.")
    check_stateless(processors)
    check_model(model, "target")
    cache = model_kwargs.get("past_key_values")
    if model_kwargs.get("use_cache") and not is_static_by_request(cache):
        check_rewindable(cache, "target")


def check_model(model: PreTrainedModel, role: str) -> None:
    """Refuse models without weights at hand, and models with a state that can't be taken back.

    Raises:
        ValueError: names the model, its role and the way out.
    """
    name = type(model).__name__
    if model.device.type == "meta":
        raise ValueError(
            f"the {role} {name} is on the 'meta' device, where there is nothing to compute with: load its weights, "
            "or give it a device_map that keeps its first layer on a real device."
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"the {role} {name} keeps a recurrent state that can't be rolled back after a rejected draft: choose "
            "an attention-only model, or generation_strategy=None."
        )


def needs_translation(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether drafts have to be carried from one vocabulary to the other.

    Raises:
        ValueError: the vocabularies differ by more than padding and a tokenizer is missing.
    """
    if tokenizers_disagree(tokenizer, assistant_tokenizer):
        return True
    sizes = vocabulary_size(model), vocabulary_size(draft)
    if abs(sizes[0] - sizes[1]) <= MAX_VOCABULARY_PADDING:
        return False
    if tokenizer is None or assistant_tokenizer is None:
        raise ValueError(
            f"assistant_model={type(draft).__name__} has a vocabulary of {sizes[1]} tokens and the target one of "
            f"{sizes[0]}, which is more than padding: choose a draft with the target's tokenizer, or pass both "
            "tokenizer= and assistant_tokenizer=."
        )
    return False


def vocabulary_size(model: PreTrainedModel) -> int:
    """V: the number of scores that the model gives each position."""
    return model.config.get_text_config(decoder=True).vocab_size
