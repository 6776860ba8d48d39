"""Make the drafter that a call's settings select."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.config import SpeculationConfig
from hf_specdec.drafting.draft_inputs import draft_inputs, source_tokens
from hf_specdec.drafting.drafter import Drafter, NoDrafter
from hf_specdec.drafting.hybrid import HybridDrafter
from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.drafting.other_device import OtherDeviceDrafter, is_on_other_device
from hf_specdec.drafting.other_tokenizer import OtherTokenizerDrafter, of_any_vocabulary, translated_inputs
from hf_specdec.drafting.own_drafter import OwnDrafter
from hf_specdec.drafting.suffix import SuffixDrafter
from hf_specdec.drafting.suffix_automaton import SuffixAutomaton
from hf_specdec.drafting.tolerant import TolerantDrafter
from hf_specdec.drafting.two_vocabularies import TwoVocabularies, needs_translation
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.transcript import Transcript
from hf_specdec.lengths.history import LengthHistory, length_history
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.models.block_runner import BlockRunner, check_block_draft
from hf_specdec.models.cache_choice import outgrows_windows, static_cache, supports_recorded_row, supports_rows_cache
from hf_specdec.models.cache_names import cache_argument, cache_of
from hf_specdec.models.eagle_draft import Eagle3Draft
from hf_specdec.models.eagle_runner import Eagle3Runner
from hf_specdec.models.key_reading_runner import KeyReadingRunner
from hf_specdec.models.mtp_runner import MtpRunner, mtp_layers
from hf_specdec.models.onednn_linears import Kernels, onednn_linears
from hf_specdec.models.runner_choice import Runner, runner_for
from hf_specdec.models.states_runner import StatesRunner
from hf_specdec.models.static_cache import CacheSize
from hf_specdec.models.text_only_runner import TextOnlyRunner, text_kwargs, text_places
from hf_specdec.models.traits import context_length, media_of, reads_keys, vocabulary_size
from hf_specdec.models.trimmed_head import head_tokens
from hf_specdec.strategies import STRATEGY_TABLE, stop_rule

# Draft steps on an accelerator between two copies to the host, if a stop rule may end the draft at any step. Each
# copy waits for all steps before it.
ACCELERATOR_STEPS_PER_SYNC = 4


@dataclass(frozen=True)
class DraftCall:
    """The parts of a call that drafters are made from.

    Args:
        model, draft: the target, and the draft model or None.
        tokenizers: the target's and the draft's; None for those that were not passed.
        transcript: the rows' texts.
        processors: the caller's logits processors for drafts.
        generation_config, model_kwargs: as prepared by `generate` for the target.
        inputs_tensor: `[B / num_return_sequences, ...]`, the inputs that were passed to `generate`.
        media: pictures and video as passed to `generate`, if known.
        static_size: the size of the static caches; None for dynamic ones.
        kernels: makes the context manager for passes.
        stand_in: makes a drafter that replaces the draft model.
        remembered: earlier answers to copy from.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]
    transcript: Transcript
    processors: HostProcessors
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    inputs_tensor: Tensor | None
    media: Mapping[str, Any] = field(default_factory=dict)
    static_size: CacheSize | None = None
    kernels: Kernels = onednn_linears
    stand_in: Callable[[StopRule], Drafter] | None = None
    remembered: Sequence[SuffixAutomaton] = ()

    @property
    def models(self) -> tuple[PreTrainedModel, ...]:
        """The target, and the draft if there is one."""
        return (self.model,) if self.draft is None else (self.model, self.draft)


def make_drafter(config: SpeculationConfig, call: DraftCall) -> Drafter:
    """Make the drafter of a call from resolved settings.

    Raises:
        ValueError: the models don't fit together, or the settings don't work with different tokenizers.
    """
    known = _length_history(config, call)
    makers = {
        "model": lambda: _model(config, call, stop_rule(config, known)),
        "suffix": lambda: _suffix(config, call, known),
        "hybrid": lambda: _hybrid(config, call, known),
        "mtp": lambda: _own(config, call, stop_rule(config, known)),
        "dflash": lambda: _own(config, call, stop_rule(config, known)),
        "none": NoDrafter,
    }
    drafter = makers[config.drafter]()
    return TolerantDrafter(drafter) if config.on_draft_error == "continue" else drafter


def _length_history(config: SpeculationConfig, call: DraftCall) -> LengthHistory | None:
    """The history of earlier calls with the same models, settings and number of rows; None without "auto"."""
    if config.num_assistant_tokens != "auto":
        return None
    return length_history(call.model, _situation(config, call))


def _situation(config: SpeculationConfig, call: DraftCall) -> Hashable:
    """A key that calls share if the measurements of one apply to the other."""
    draft = None
    if config.drafts_by_model and call.draft is not None:
        # A trimmed head is faster and accepted less often.
        draft = weakref.ref(call.draft), head_tokens(call.draft)
    places = tuple((str(model.device), model.dtype) for model in call.models)
    sampled = call.generation_config.do_sample and call.generation_config.temperature
    return (replace(config, suffix_memory=None), draft, places, sampled, call.transcript.batch_size)


def _suffix(config: SpeculationConfig, call: DraftCall, known: LengthHistory | None) -> SuffixDrafter:
    return SuffixDrafter(
        StopRule(config.longest_draft),
        vocabulary=vocabulary_size(call.model),
        processors=call.processors,
        sources=source_tokens(call.model_kwargs, call.transcript.sequences, call.inputs_tensor),
        eos_tokens=call.transcript.eos_tokens,
        remembered=call.remembered,
        known=known,
    )


def _hybrid(config: SpeculationConfig, call: DraftCall, known: LengthHistory | None) -> HybridDrafter:
    rule = stop_rule(config, known)
    return HybridDrafter(_suffix(config, call, known), _model(config, call, rule), rule)


def _model(config: SpeculationConfig, call: DraftCall, rule: StopRule) -> Drafter:
    if call.stand_in is not None:
        return call.stand_in(rule)
    draft, input_ids = call.draft, call.transcript.sequences
    assert draft is not None, "checked by SpeculativeDecoding"
    if reads_keys(draft) or isinstance(draft, Eagle3Draft):
        return _own(config, call, rule)
    if needs_translation(call.model, draft, *call.tokenizers):
        return _across_tokenizers(config, call, rule)
    kwargs = draft_inputs(draft, call.model_kwargs, input_ids, call.inputs_tensor, call.media)
    runner, left_out = _draft_runner(call, draft, kwargs)
    positions = context_length(draft)
    do_sample = bool(call.generation_config.do_sample)
    settings: dict[str, Any] = {
        "vocabulary": vocabulary_size(call.model),
        "draft_vocabulary": vocabulary_size(draft),
        "do_sample": do_sample,
        "keep_probs": STRATEGY_TABLE[config.strategy].keeps_draft_probs(do_sample),
        "eos_tokens": call.transcript.eos_tokens,
        "max_positions": None if positions is None else positions + left_out,
        "steps_per_sync": _steps_per_sync(draft.device, rule, config.longest_draft),
    }
    if not is_on_other_device(draft.device, input_ids.device, call.processors):
        return ModelDrafter(runner, call.processors, rule, **settings)
    return OtherDeviceDrafter(runner, call.processors, rule, device=draft.device, **settings)


def _own(config: SpeculationConfig, call: DraftCall, rule: StopRule) -> OwnDrafter:
    model, do_sample = call.model, bool(call.generation_config.do_sample)
    given = call.model_kwargs, call.transcript.sequences, call.transcript.capacity
    runner: StatesRunner
    known = vocabulary_size(model)
    if config.drafter == "mtp":
        runner = MtpRunner(mtp_layers(model), *given, call.kernels)
    elif isinstance(call.draft, Eagle3Draft):
        runner, known = Eagle3Runner(call.draft, model, *given, call.kernels), vocabulary_size(call.draft)
    elif call.draft is not None and config.drafts_by_model:
        runner = KeyReadingRunner(call.draft, model, *given, call.kernels)
    else:
        assert call.draft is not None, "checked by SpeculativeDecoding"
        check_block_draft(model, call.draft)
        runner = BlockRunner(call.draft, model, *given, config.longest_draft, call.kernels)
    return OwnDrafter(
        runner,
        call.processors,
        rule,
        vocabulary=vocabulary_size(model),
        draft_vocabulary=known,
        do_sample=do_sample,
        keep_probs=STRATEGY_TABLE[config.strategy].keeps_draft_probs(do_sample),
        eos_tokens=call.transcript.eos_tokens,
        max_positions=context_length(model),
        steps_per_sync=_steps_per_sync(model.device, rule, config.longest_draft),
    )


def _steps_per_sync(device: torch.device, rule: StopRule, longest: int) -> int:
    """Draft steps between two copies to the host: the whole draft if only an EOS can stop it early."""
    if device.type == "cpu":
        return 1
    return ACCELERATOR_STEPS_PER_SYNC if rule.reads_probabilities else max(longest, 1)


def _draft_runner(
    call: DraftCall, draft: PreTrainedModel, kwargs: dict[str, Any]
) -> tuple[Runner | TextOnlyRunner, int]:
    """The draft's runner, and how many columns of the prompts it leaves out."""
    input_ids, tokens = call.transcript.sequences.to(draft.device), call.transcript.capacity
    places = None
    if media_of(call.model_kwargs) and not media_of(kwargs):
        places = text_places(call.model, input_ids, kwargs.get("attention_mask"))
    prompts = input_ids
    if places is not None:
        columns, mask = places
        prompts, kwargs = input_ids.gather(1, columns), text_kwargs(kwargs, mask)
    size = call.static_size
    if size is None and cache_of(kwargs) is not None and supports_recorded_row(draft, kwargs):
        # The target uses another kind of cache or another device, but recording the draft's passes still helps.
        size = CacheSize(tokens, grows=True)
    runner = _runner(call, draft, kwargs, prompts, tokens, size)
    if places is None:
        return runner, 0
    text_only = TextOnlyRunner(runner, columns, input_ids.shape[1])
    return text_only, text_only.left_out


def _runner(
    call: DraftCall,
    draft: PreTrainedModel,
    kwargs: dict[str, Any],
    prompts: Tensor,
    tokens: int,
    size: CacheSize | None,
) -> Runner:
    """A runner over `prompts` `[B, P]`, for rows of at most `tokens`; with a static cache if there is a `size`."""
    if size is not None and not (size.grows and outgrows_windows(draft, tokens)):
        kwargs[cache_argument(draft)] = static_cache(draft, kwargs, size, "assistant_model")
    chunk = call.generation_config.prefill_chunk_size
    return runner_for(draft, kwargs, prompts, tokens, kernels=call.kernels, chunk=chunk, argument="assistant_model")


def _across_tokenizers(config: SpeculationConfig, call: DraftCall, rule: StopRule) -> Drafter:
    """A drafter that translates between vocabularies.

    Raises:
        ValueError: the strategy needs the draft's probabilities in the target's vocabulary.
    """
    draft, transcript, (tokenizer, assistant_tokenizer) = call.draft, call.transcript, call.tokenizers
    assert draft is not None and tokenizer is not None and assistant_tokenizer is not None
    if STRATEGY_TABLE[config.strategy].draft_probs == "always":
        raise ValueError(
            f"generation_strategy={config.strategy!r} with a different assistant_tokenizer: it mixes the probabilities "
            "of both models, which are about different tokens, so choose a draft with the target's tokenizer, or "
            "another strategy."
        )
    vocabularies = TwoVocabularies(tokenizer, assistant_tokenizer, transcript.eos_tokens, _ends(draft))
    prompts, room = transcript.sequences, transcript.capacity - transcript.prompt_length
    inputs = translated_inputs(vocabularies, draft, prompts, room, call.model_kwargs, call.inputs_tensor)
    texts, tokens = inputs.texts, inputs.texts.capacity

    def new_runner() -> Runner:
        kwargs = draft_inputs(draft, inputs.model_kwargs, texts.prompts, inputs.inputs_tensor)
        serves = supports_rows_cache if len(texts.rows) > 1 else supports_recorded_row
        has_size = cache_of(kwargs) is not None and serves(draft, kwargs)
        return _runner(call, draft, kwargs, texts.prompts, tokens, CacheSize(tokens, grows=True) if has_size else None)

    positions = context_length(draft)
    return OtherTokenizerDrafter(
        new_runner(),
        # These processors don't change which token is most probable, but stop rules depend on probabilities.
        of_any_vocabulary(call.processors) if rule.reads_probabilities else HostProcessors(LogitsProcessorList()),
        rule,
        vocabulary=min(vocabulary_size(draft), len(assistant_tokenizer)),
        eos_tokens=vocabularies.draft.special | frozenset(_ends(draft)),
        max_positions=tokens - 1 if positions is None else min(positions, tokens - 1),
        steps_per_sync=_steps_per_sync(draft.device, rule, config.longest_draft),
        texts=texts,
        new_runner=new_runner,
        target_size=vocabulary_size(call.model),
        target_ends=transcript.eos_tokens,
        caller_processors=call.processors,
    )


def _ends(model: PreTrainedModel) -> list[int]:
    """The tokens that end a model's texts."""
    tokens = model.generation_config.eos_token_id
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)
