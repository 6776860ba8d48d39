"""`SpeculativeDecoding`: the decoding loop as a callable for `generate(custom_generate=...)`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from hf_specdec.checks import check_call, check_draft, check_kinds, check_model
from hf_specdec.compat.transformers_private import is_callers_cache, mask_length, pad_token
from hf_specdec.config import FIELDS, WITH_MODEL, SpeculationConfig, check_fields
from hf_specdec.decoding import Decoder
from hf_specdec.drafting.draft_settings import with_settings_of
from hf_specdec.drafting.drafter_choice import DraftCall, make_drafter
from hf_specdec.drafting.suffix_memory import TOKENS_BEFORE
from hf_specdec.host.caller import warn_caller
from hf_specdec.host.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.torch_state import KeptTorchState
from hf_specdec.host.transcript import Transcript, maximum_length
from hf_specdec.in_order_decoding import InOrderDecoder
from hf_specdec.models.cache_choice import (
    cache_taken_over,
    outgrows_windows,
    static_cache,
    supports_recorded_row,
    supports_rows_cache,
)
from hf_specdec.models.cache_names import CACHE_NAME, cache_argument, cache_of
from hf_specdec.models.cache_rollback import copy_out_of_inference_mode, is_static_by_request, is_unused_default
from hf_specdec.models.decoder_states import STATES, decoder_states
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.expert_capacity import most_drafts
from hf_specdec.models.onednn_linears import onednn_linears
from hf_specdec.models.rope_stages import check_dropped_cache
from hf_specdec.models.runner_choice import runner_for
from hf_specdec.models.static_cache import CacheSize
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.models.traits import (
    context_length,
    drafting_model,
    generating_parts,
    has_default_inputs,
    pass_mode,
    tensor_parallel_group,
    text_prefix,
)
from hf_specdec.prepared import compiled_step, cuda_graphs
from hf_specdec.prepared.compile_progress import tqdm_disabled
from hf_specdec.prepared.engine import prepared_capacity
from hf_specdec.prepared.pass_kernels import pass_kernels
from hf_specdec.prepared.prepared_rounds import prepared_rounds
from hf_specdec.rules.round_statistics import SpeculationStats
from hf_specdec.rules.shared_decisions import among
from hf_specdec.rules.verification import SAMPLING_RULES, greedy
from hf_specdec.strategies import STRATEGY_TABLE

P = ParamSpec("P")
T = TypeVar("T")
_last: WeakKeyDictionary[PreTrainedModel, SpeculationStats] = WeakKeyDictionary()


def last_speculation(model: PreTrainedModel) -> SpeculationStats | None:
    """The statistics of the target's most recently started speculative call, finished or not; None before the first.

    If several threads call `generate`, use `return_dict_in_generate=True` and the output's `speculation` instead.
    """
    return next((_last[target] for target in generating_parts(model) if target in _last), None)


def _names_settings(call: Callable[P, T]) -> Callable[P, T]:
    """Add all settings to a function's signature, since `generate` passes on only arguments named there."""
    signature = inspect.signature(call)
    *named, rest = signature.parameters.values()
    settings = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in FIELDS]
    call.__signature__ = signature.replace(parameters=[*named, *settings, rest])  # type: ignore[attr-defined]
    return call


class SpeculativeDecoding:
    """Speculative decoding without patching: `model.generate(**inputs, custom_generate=SpeculativeDecoding(draft))`.

    `generate` does not pass all of its arguments on to a custom loop. Pass these to this object instead: `streamer`
    (also to `generate` if it should receive the prompt), `tokenizer`, `assistant_tokenizer` and `media`. For
    `stop_strings`, add a `StopStringCriteria` to `stopping_criteria`. With `hf_specdec.enable`, all of them are
    ordinary arguments.

    Args:
        assistant_model: the draft, on any device and in any dtype; None for drafters that need no model.
        strategy: `"speculative"`, `"bild"`, `"lenient"`, `"typical"` or `"ensemble"`.
        streamer, tokenizer, assistant_tokenizer: the arguments of `generate`.
        media: the arguments of `generate` that hold pictures or video, which `generate` encodes with the target. A
            draft of the same kind encodes them itself.
        settings: `num_assistant_tokens`, `fallback_threshold`, … (see `SpeculationConfig`). Settings in the call of
            `generate` override them. Settings in a `generation_config` are ignored here, because a lookahead set by
            the user cannot be told apart from the default that `generate` fills in.

    Attributes:
        stats: `SpeculationStats` of the most recently started call, even if it raised an exception. If several threads
            call `generate`, use `return_dict_in_generate=True` and the output's `speculation` instead.

    Raises:
        ValueError: an unknown strategy or setting, or a value out of range. Calls also raise it for models and
            arguments of `generate` that speculation does not support.
    """

    def __init__(
        self,
        assistant_model: PreTrainedModel | None = None,
        strategy: str = "speculative",
        *,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        media: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_fields(settings)
        self.config = SpeculationConfig(strategy, **settings)
        self.assistant_model = assistant_model
        check_draft(assistant_model, self.config)
        self.streamer = streamer
        self.tokenizer = tokenizer
        self.assistant_tokenizer = assistant_tokenizer
        self.media = media or {}
        self.stats: SpeculationStats | None = None

    @_names_settings
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
        """Decode, with the contract of `GenerationMixin._sample`. Settings of the call override the object's."""
        settings = {name: value for name in FIELDS if (value := model_kwargs.pop(name, None)) is not None}
        config = replace(self.config, **settings).choosing(has_model=self.assistant_model is not None)
        check_draft(self.assistant_model, config)
        if self.assistant_model is not None and config.drafter in WITH_MODEL:
            config = with_settings_of(self.assistant_model, config)
        with KeptTorchState():
            return self._decode(
                config.resolve(model.config.model_type),
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                inputs_tensor,
                model_kwargs,
            )

    def _decode(
        self,
        config: SpeculationConfig,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None,
        model_kwargs: dict[str, Any],
    ) -> Tensor | SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
        """Decode with a call's resolved settings."""
        check_call(model, input_ids, generation_config, logits_processor, model_kwargs)
        model_kwargs = {name: value for name, value in model_kwargs.items() if name not in STATES}
        config = _compilable(config, input_ids.device)
        draft = None if self.assistant_model is None else drafting_model(self.assistant_model)
        if draft is not None and config.drafts_by_model:
            check_model(draft, "assistant_model")
            check_kinds(model, draft)
        returns_dict = bool(generation_config.return_dict_in_generate)
        longest = min(maximum_length(stopping_criteria), context_length(model) or sys.maxsize)
        config = config.within(max(longest - input_ids.shape[1], 1)).drafting_at_most(most_drafts(model, input_ids))
        transcript = self._transcript(config, input_ids, stopping_criteria, generation_config)
        processors = HostProcessors(logits_processor, pad_token(generation_config) or 0)
        cached = _cached_tokens(input_ids, model_kwargs, generation_config)
        check_dropped_cache(model, cache_of(model_kwargs), input_ids.shape[1], cached, transcript.max_length)
        models = [model] if draft is None else [model, draft]
        callers = cache_taken_over(model, model_kwargs) if config.compile and not cached else None
        static_size = _static_size(config, transcript, models, model_kwargs, taken_over=callers is not None)
        call = DraftCall(
            model=model,
            draft=draft,
            tokenizers=(self.tokenizer, self.assistant_tokenizer),
            transcript=transcript,
            processors=processors.for_drafts(),
            generation_config=generation_config,
            model_kwargs=dict(model_kwargs),
            inputs_tensor=inputs_tensor,
            media=self.media,
            static_size=static_size,
            kernels=pass_kernels if config.compile else onednn_linears,
            remembered=() if config.suffix_memory is None else config.suffix_memory.automata(model),
        )
        if static_size is not None:
            model_kwargs[cache_argument(model)] = static_cache(model, model_kwargs, static_size, "model")
        decoder = _decoder(config, call, processors, model_kwargs, input_ids, cached)
        # Kept in a local variable too, since other threads may replace the attribute.
        stats = self.stats = _last[model] = SpeculationStats(config.strategy)
        with among(tensor_parallel_group(*call.models)), tqdm_disabled(config.disable_tqdm):
            cache = _run(decoder, transcript, stats, callers, compile=config.compile, keep_cache=returns_dict)
        transcript.end()
        if config.suffix_memory is not None:
            config.suffix_memory.add(model, transcript.answers(TOKENS_BEFORE))
        if not returns_dict:
            return transcript.sequences.clone()
        asked = [name for name in STATES if getattr(generation_config, name, None)]
        states = decoder_states(model, call.model_kwargs, transcript.sequences, transcript.prompt_length, asked)
        return _output(model, transcript, cache, stats, states)

    def _transcript(
        self,
        config: SpeculationConfig,
        input_ids: Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> Transcript:
        returns_dict = generation_config.return_dict_in_generate
        return Transcript(
            input_ids,
            stopping_criteria,
            pad_token(generation_config),
            self.streamer,
            spare=config.longest_draft + 1,
            keep_scores=bool(returns_dict and generation_config.output_scores),
            keep_logits=bool(returns_dict and generation_config.output_logits),
        )


def _compilable(config: SpeculationConfig, device: torch.device) -> SpeculationConfig:
    """Warn and drop `compile` if compiling for the device is not supported."""
    refusal = compiled_step.compile_refusal(device) if config.compile else None
    if refusal is None:
        return config
    warn_caller(refusal)
    return replace(config, compile=False)


def _decoder(
    config: SpeculationConfig,
    call: DraftCall,
    processors: HostProcessors,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
    cached: int,
) -> Decoder:
    """Build the loop for a call, with its drafter and the target's runner.

    Args:
        processors: the caller's processors; `call` has those for drafts.
        model_kwargs: the target's arguments, including its cache.
        cached: the number of tokens that the cache holds before `input_ids`.
    """
    model = call.model
    # Made before the target's runner, which modifies the cache, since making the drafter may raise.
    drafter = make_drafter(config, call)
    capacity, chunk = call.transcript.capacity, call.generation_config.prefill_chunk_size
    target = runner_for(model, model_kwargs, input_ids, capacity, cached, call.kernels, chunk)
    if drafter.states is not None:
        target.hand_out(drafter.states)
    do_sample = bool(call.generation_config.do_sample)
    strategy = STRATEGY_TABLE[config.strategy]
    positions = context_length(model)
    decoder = InOrderDecoder if processors.in_order else Decoder
    return decoder(
        target=target,
        drafter=drafter,
        processors=processors,
        relaxation=strategy.relaxation(config, not do_sample),
        rule=strategy.sampling_rule(config, SAMPLING_RULES[config.verification]) if do_sample else greedy,
        do_sample=do_sample,
        # Custom processors may need gradients, which inference mode does not support.
        mode=pass_mode(*call.models) if processors.scores_only else torch.no_grad,
        max_positions=None if positions is None else positions - cached,
        drafts_in_first_round=drafter.states is None
        and _last_token_visible(model, model_kwargs)
        and not target.prompt_alone
        and (chunk is None or has_default_inputs(model)),
    )


def _run(
    decoder: Decoder,
    transcript: Transcript,
    stats: SpeculationStats,
    callers: DynamicCache | None,
    *,
    compile: bool,
    keep_cache: bool,
) -> Cache | None:
    """Decode, and return the cache for the caller, usable outside inference mode; None if it is not returned.

    Args:
        callers: the caller's cache, if a static one replaces it during the call.
    """
    target = decoder.target
    with prepared_rounds(decoder, transcript, compile=compile) as rounds:
        if callers is not None and isinstance(target, StaticRunner):
            target.take(callers, transcript.prompt_length - 1)
        try:
            decoder.decode(transcript, stats, rounds)
        finally:
            kept = keep_cache or is_callers_cache(target.cache)
            if isinstance(target, DynamicRunner) and kept and target.cache is not None:
                copy_out_of_inference_mode(target.cache)
            if callers is not None and isinstance(target, StaticRunner):
                with torch.inference_mode(False), torch.no_grad():
                    target.give(callers, decoder.kept_length(transcript))
        if not keep_cache or callers is not None:
            return callers if keep_cache else None
        return target.as_dynamic(decoder.kept_length(transcript)) if isinstance(target, StaticRunner) else target.cache


def _static_size(
    config: SpeculationConfig,
    transcript: Transcript,
    models: Sequence[PreTrainedModel],
    model_kwargs: dict[str, Any],
    *,
    taken_over: bool,
) -> CacheSize | None:
    """The size of a call's static caches, for the target and its draft; None to use dynamic ones or the caller's own.

    Static caches are used on request, for compiled rounds, for batches, and for single rows whose passes can be
    recorded. In a batch, rows accept different numbers of tokens. A dynamic cache would have to move their entries in
    every round, which took longer than the passes.
    """
    model, cache, tokens = models[0], cache_of(model_kwargs), transcript.capacity
    within_context = transcript.max_length <= (context_length(model) or sys.maxsize)  # required by prepared rounds
    if is_static_by_request(cache) or (config.compile and within_context and (taken_over or is_unused_default(cache))):
        prepared = config.compile or cuda_graphs.captures(transcript.device)
        return CacheSize(prepared_capacity(tokens, *(models if config.compile else ())) if prepared else tokens)
    serves = supports_rows_cache if transcript.batch_size > 1 else supports_recorded_row
    if is_unused_default(cache) and serves(model, model_kwargs) and not outgrows_windows(model, tokens):
        return CacheSize(tokens, grows=True)
    return None


def _last_token_visible(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether every row's last prompt token is visible."""
    mask = model_kwargs.get(f"{text_prefix(model)}attention_mask")
    return mask is None or bool(mask[:, -1].all())


def _cached_tokens(input_ids: Tensor, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> int:
    """The number of cached tokens before `input_ids`, derived from the mask as in `GenerationMixin._prefill`."""
    mask, cache = model_kwargs.get("attention_mask"), cache_of(model_kwargs)
    if cache is None or "encoder_outputs" in model_kwargs:
        return 0
    covered = mask.shape[1] if mask is not None else mask_length(generation_config, input_ids.shape[1])
    return max(covered - input_ids.shape[1], 0)


def _output(
    model: PreTrainedModel,
    transcript: Transcript,
    cache: Cache | None,
    stats: SpeculationStats,
    states: dict[str, Any],
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """The output of `generate` with the statistics attached."""
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    output = kind(
        sequences=transcript.sequences.clone(),
        scores=transcript.scores,
        logits=transcript.logits,
        **states,
        **{CACHE_NAME: cache},
    )
    output.speculation = stats
    return output
