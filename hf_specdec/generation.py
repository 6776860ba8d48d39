"""`SpeculativeDecoding`: the decoding loop as a callable for `generate(custom_generate=...)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from hf_specdec.checks import check_call, check_is_model, check_kinds, check_model
from hf_specdec.config import SpeculationConfig, check_fields
from hf_specdec.decoding import Decoder
from hf_specdec.drafting.drafter_choice import DraftCall, make_drafter
from hf_specdec.host.outputs import SpeculativeDecoderOnlyOutput, SpeculativeEncoderDecoderOutput
from hf_specdec.host.processors import HostProcessors
from hf_specdec.host.transcript import Transcript
from hf_specdec.models.cache_rollback import (
    cache_argument,
    copy_out_of_inference_mode,
    is_static_by_request,
    is_unused_default,
)
from hf_specdec.models.dynamic_runner import DynamicRunner
from hf_specdec.models.masks import attention_windows
from hf_specdec.models.runner_choice import runner_for
from hf_specdec.models.static_cache import CacheSize
from hf_specdec.models.static_runner import StaticRunner, static_cache, supports_recorded_row, supports_rows_cache
from hf_specdec.models.traits import context_length, pass_mode, tensor_parallel_group, without_adapter_wrapper
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.engine import prepared_capacity
from hf_specdec.prepared.prepared_decoder import with_prepared_rounds
from hf_specdec.rules.shared_decisions import among
from hf_specdec.rules.statistics import SpeculationStats
from hf_specdec.rules.verification import SAMPLING_RULES, greedy
from hf_specdec.strategies import STRATEGY_TABLE

LONG_TEXT = 4096  # tokens, above which models with sliding windows get caches that drop what has left the windows

_last: WeakKeyDictionary[PreTrainedModel, SpeculationStats] = WeakKeyDictionary()


def last_speculation(model: PreTrainedModel) -> SpeculationStats | None:
    """The statistics of the speculative call of a target that started last, finished or not; None before the first.

    With calls in several threads, use `return_dict_in_generate=True` and the output's `speculation` instead.
    """
    return _last.get(model)


class SpeculativeDecoding:
    """Speculative decoding without patching: `model.generate(**inputs, custom_generate=SpeculativeDecoding(draft))`.

    On that path `generate` keeps some arguments for itself. Give them to this object instead: `streamer` (pass it
    to `generate` too if it should get the prompt), `tokenizer` and `assistant_tokenizer`. `stop_strings` need a
    `StopStringCriteria` in `stopping_criteria`. With `hf_specdec.enable` all of them are plain arguments.

    Args:
        assistant_model: the draft, on any device and in any dtype; None for drafters that need none.
        strategy: `"speculative"` or `"bild"`.
        streamer, tokenizer, assistant_tokenizer: as `generate` takes them.
        settings: `num_assistant_tokens`, `fallback_threshold`, … (see `SpeculationConfig`). Those in the call of
            `generate` precede them. Those of a `generation_config` are not read on this path, where a lookahead that
            was set can't be told from the default that `generate` fills in.

    Attributes:
        stats: `SpeculationStats` of the call that started last, even if an exception ended it. With calls in several
            threads, use `return_dict_in_generate=True` and the output's `speculation` instead.

    Raises:
        ValueError: an unknown strategy or setting, or a value out of range; on the call, what can't be done with
            the model or the arguments of `generate`.
    """

    def __init__(
        self,
        assistant_model: PreTrainedModel | None = None,
        strategy: str = "speculative",
        *,
        streamer: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        **settings: Any,
    ) -> None:
        check_fields(settings)
        self.config = SpeculationConfig(strategy, **settings)
        self.assistant_model = assistant_model
        self._check_draft(self.config)
        self.streamer = streamer
        self.tokenizer = tokenizer
        self.assistant_tokenizer = assistant_tokenizer
        self.stats: SpeculationStats | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        num_assistant_tokens: int | Literal["auto"] | None = None,
        fallback_threshold: float | None = None,
        rollback_threshold: float | None = None,
        drafter: str | None = None,
        verification: str | None = None,
        entropy_threshold: float | None = None,
        compile: bool | None = None,
        on_draft_error: str | None = None,
        **model_kwargs: Any,
    ) -> Tensor | SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
        """The decoding loop; keeps the contract of `GenerationMixin._sample`.

        `generate` hands over those of its arguments that are named here: a call's settings, before the object's.
        """
        settings: dict[str, Any] = {
            "num_assistant_tokens": num_assistant_tokens,
            "fallback_threshold": fallback_threshold,
            "rollback_threshold": rollback_threshold,
            "drafter": drafter,
            "verification": verification,
            "entropy_threshold": entropy_threshold,
            "compile": compile,
            "on_draft_error": on_draft_error,
        }
        config = replace(self.config, **{name: value for name, value in settings.items() if value is not None})
        self._check_draft(config)
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

    def _check_draft(self, config: SpeculationConfig) -> None:
        if self.assistant_model is not None:
            check_is_model(self.assistant_model)
        elif config.drafts_by_model:
            raise ValueError(
                f"assistant_model=None with generation_strategy={config.strategy!r} and drafter={config.drafter!r}: "
                "pass the draft, assistant_model=draft, in the call or to hf_specdec.enable(model, "
                "assistant_model=draft), or choose drafter='lookup', which needs none."
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
        """The decoding loop by a call's resolved settings."""
        check_call(model, generation_config, logits_processor, model_kwargs)
        draft = None if self.assistant_model is None else without_adapter_wrapper(self.assistant_model)
        if draft is not None and config.drafts_by_model:
            check_model(draft, "assistant_model")
            check_kinds(model, draft)
        returns_dict = bool(generation_config.return_dict_in_generate)
        transcript = self._transcript(config, input_ids, stopping_criteria, generation_config)
        processors = HostProcessors(logits_processor, _pad_token(generation_config) or 0)
        hidden = _hidden_tokens(input_ids, model_kwargs, generation_config)
        static_size = _static_size(config, transcript, model, model_kwargs)
        call = DraftCall(
            model=model,
            draft=draft,
            tokenizers=(self.tokenizer, self.assistant_tokenizer),
            transcript=transcript,
            processors=processors,
            generation_config=generation_config,
            model_kwargs=dict(model_kwargs),
            inputs_tensor=inputs_tensor,
            static_size=static_size,
        )
        if static_size is not None:
            model_kwargs[cache_argument(model)] = static_cache(model, model_kwargs, static_size, "model")
        # Before the target's, which marks the cache: this one may refuse.
        drafter = make_drafter(config, call)
        target = runner_for(model, model_kwargs, input_ids, transcript.ids.shape[1], hidden)
        do_sample = bool(generation_config.do_sample)
        make_rollback = STRATEGY_TABLE[config.strategy].rollback
        decoder = Decoder(
            target=target,
            drafter=drafter,
            processors=processors,
            relaxation=make_rollback(config, not do_sample) if make_rollback else None,
            rule=SAMPLING_RULES[config.verification] if do_sample else greedy,
            do_sample=do_sample,
            # Processors of the caller's own may want gradients, which inference mode would deny them.
            mode=pass_mode(*call.models) if processors.scores_only else torch.no_grad,
            max_positions=None if (positions := context_length(model)) is None else positions - hidden,
            drafts_in_first_round=_ends_unmasked(model, model_kwargs),
        )
        # Other threads may replace the attribute.
        stats = self.stats = _last[model] = SpeculationStats(config.strategy)
        with among(tensor_parallel_group(*call.models)):
            cache = _run(decoder, transcript, stats, compile=config.compile, keep_cache=returns_dict)
        transcript.end()
        if not returns_dict:
            return transcript.sequences.clone()
        return _output(model, transcript, cache, stats)

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
            _pad_token(generation_config),
            self.streamer,
            spare=config.longest_draft + 1,
            keep_scores=bool(returns_dict and generation_config.output_scores),
            keep_logits=bool(returns_dict and generation_config.output_logits),
        )


def _run(
    decoder: Decoder, transcript: Transcript, stats: SpeculationStats, *, compile: bool, keep_cache: bool
) -> Cache | None:
    """Decode; returns the cache that goes to the caller, made his own, None where none does."""
    target = decoder.target
    with with_prepared_rounds(decoder, transcript, compile=compile) as running:
        try:
            running.decode(transcript, stats)
        finally:
            kept = keep_cache or getattr(target.cache, "_is_user_defined", False)
            if isinstance(target, DynamicRunner) and kept and target.cache is not None:
                copy_out_of_inference_mode(target.cache)
        if isinstance(target, StaticRunner) and keep_cache:
            return target.as_dynamic(transcript.common_length - 1)
    return target.cache if keep_cache else None


def _static_size(
    config: SpeculationConfig, transcript: Transcript, model: PreTrainedModel, model_kwargs: dict[str, Any]
) -> CacheSize | None:
    """How large the static caches of a call are; None where dynamic ones serve it better, or it brings its own.

    They serve batches by themselves: rows that accept unevenly would have to be moved in a dynamic cache in every
    round, which took longer than the passes themselves. And a single row where passes can be recorded.
    """
    cache, tokens = model_kwargs.get("past_key_values"), transcript.ids.shape[1]
    if is_static_by_request(cache) or (config.compile and is_unused_default(cache)):
        prepared = config.compile or cuda_graphs.captures(transcript.ids.device)
        return CacheSize(prepared_capacity(tokens) if prepared else tokens)
    serves = supports_rows_cache if transcript.batch_size > 1 else supports_recorded_row
    if is_unused_default(cache) and serves(model, model_kwargs) and not _outgrows_windows(model, tokens):
        return CacheSize(tokens, grows=True)
    return None


def _outgrows_windows(model: PreTrainedModel, tokens: int) -> bool:
    """Whether a dynamic cache, which drops what sliding windows have passed, takes much less memory."""
    windows = [window for window in attention_windows(model.config).values() if window]
    return bool(windows) and tokens > max(2 * max(windows), LONG_TEXT)


def _pad_token(generation_config: GenerationConfig) -> int | None:
    pad = generation_config._pad_token_tensor
    return None if pad is None else int(pad)


def _ends_unmasked(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether every row's last prompt token is visible."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    mask = model_kwargs.get(f"{prefix}attention_mask")
    return mask is None or bool(mask[:, -1].all())


def _hidden_tokens(input_ids: Tensor, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> int:
    """Tokens of a given cache that come before `input_ids`, as `GenerationMixin._prefill` tells by the mask."""
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
    if cache is None or "encoder_outputs" in model_kwargs:
        return 0
    covered = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
    return max(covered - input_ids.shape[1], 0)


def _output(
    model: PreTrainedModel, transcript: Transcript, cache: Cache | None, stats: SpeculationStats
) -> SpeculativeDecoderOnlyOutput | SpeculativeEncoderDecoderOutput:
    """The output of `generate`, with the statistics."""
    kind = SpeculativeEncoderDecoderOutput if model.config.is_encoder_decoder else SpeculativeDecoderOnlyOutput
    output = kind(
        sequences=transcript.sequences.clone(),
        scores=transcript.scores,
        logits=transcript.logits,
        past_key_values=cache,
    )
    output.speculation = stats
    return output
