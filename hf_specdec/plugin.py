"""`enable` and `disable`: add speculation strategies to the arguments of `model.generate`.

While at least one `enable` is active, a thin wrapper replaces `GenerationMixin.generate`. It removes the package's
arguments from the call and passes a `SpeculativeDecoding` to transformers' `custom_generate` hook. Models are not
modified. Classes that override `generate` reach the wrapper through `super().generate`.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any
from weakref import WeakSet, ref

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specdec.checks import (
    check_cache_implementation,
    check_flags,
    check_is_model,
    check_versions,
    checked_target,
)
from hf_specdec.compat.transformers_private import unknown_arguments
from hf_specdec.config import FIELDS, SpeculationConfig, check_fields
from hf_specdec.generation import SpeculativeDecoding
from hf_specdec.host.suppressed_tokens import add_dropped
from hf_specdec.host.torch_state import KeptTorchState
from hf_specdec.models.cache_names import OUTDATED_NAMES
from hf_specdec.models.traits import generating_parts, media_of, wrapped_model
from hf_specdec.prepared.engine_store import release

ARGUMENTS = ("assistant_model", "generation_strategy", *FIELDS)
# transformers' arguments that select a drafter of the target's own: their value, and the drafter's name here.
ASKED_FOR_BY: dict[str, tuple[Any, str]] = {"use_mtp": (True, "mtp"), "speculation_type": ("dflash", "dflash")}
_UNSET: Any = object()

_parameters = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
# `generate` renames the outdated names and reads the last three from its keyword arguments, so its signature does not
# list them.
KNOWN = frozenset({*_parameters, *OUTDATED_NAMES, "tokenizer", "assistant_tokenizer", "trust_remote_code"})
# transformers' defaults for the length of drafts. Whisper's `generate` fills them in before it calls the general one.
_FILLED_IN = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
# The ids of the models whose `generate` is running in this context.
_running: ContextVar[frozenset[int]] = ContextVar("hf_specdec_running", default=frozenset())


class Enabled:
    """An active `enable`. As a context manager, it is undone on exit.

    It keeps the draft alive as long as the target lives, but never the target, even if that is its own draft.
    """

    def __init__(self, model: PreTrainedModel | None, defaults: dict[str, Any]) -> None:
        self._model = None if model is None else ref(model, _forget_defaults)
        draft = defaults.get("assistant_model")
        self._own_draft = ref(draft) if model is not None and wrapped_model(draft) is model else None
        self._defaults = {**defaults, "assistant_model": None} if self._own_draft is not None else defaults

    @property
    def defaults(self) -> dict[str, Any]:
        """The package's arguments for calls that don't name them."""
        if self._own_draft is None or self._model is None:
            return self._defaults
        return {**self._defaults, "assistant_model": self._own_draft() or self._model()}

    def forget(self) -> None:
        """Release the draft."""
        self._defaults, self._own_draft = {}, None

    def covers(self, model: object) -> bool:
        """Whether this applies to calls of `model`."""
        return self._model is None or self._model() is model

    @property
    def alive(self) -> bool:
        """Whether the target still exists."""
        return self._model is None or self._model() is not None

    def is_for(self, model: object | None) -> bool:
        """Whether this was enabled for exactly `model`, where None means every model."""
        return self._model is None if model is None else self._model is not None and self._model() is model

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self)


def _forget_defaults(model: Any) -> None:
    """Release the drafts of a target that is deleted; the next `_remove` removes the entries."""
    for enabled in tuple(_stack):
        if not enabled.alive:
            enabled.forget()


_stack: list[Enabled] = []
_changing = threading.RLock()  # `_stack` and what is installed change together
# The installed wrapper and the function it replaced: transformers' `generate`, or another package's wrapper.
_installed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
# All wrappers ever installed: one that another package has wrapped or restored stays after the last `disable`.
_wrappers: WeakSet[Callable[..., Any]] = WeakSet()


def enable(
    model: PreTrainedModel | None = None,
    *,
    assistant_model: PreTrainedModel | None = _UNSET,
    generation_strategy: str | None = _UNSET,
    **settings: Any,
) -> Enabled:
    """Make `generate` accept `generation_strategy` and its settings.

    Args:
        model: the target, possibly wrapped (PEFT, `torch.compile`, DDP); held weakly. None for all models.
        assistant_model, generation_strategy: defaults for later calls. If either of them or a `drafter` is set, calls
            speculate without further arguments, with the strategy `"speculative"` unless another is named;
            `generation_strategy=None`, here or in a call, opts out.
        settings: defaults for the fields of `SpeculationConfig`.

    Returns:
        A handle, usable as a context manager. Without one, call `disable`. Calls of `enable` can be nested: a later
        one overrides the settings that it names and inherits the others.

    Raises:
        ImportError: a version of torch or transformers that the package does not support.
        ValueError: an unknown strategy or field, a value out of range, an `assistant_model` that is not a model, or a
            `model` whose own `generate` never runs transformers'.
    """
    check_versions()
    target = None if model is None else checked_target(model)
    check_fields(settings)
    if assistant_model is not _UNSET and assistant_model is not None:
        check_is_model(assistant_model)
    if generation_strategy is _UNSET or generation_strategy is None:
        SpeculationConfig(**settings)
    else:
        SpeculationConfig(generation_strategy, **settings)
    given = {"assistant_model": assistant_model, "generation_strategy": generation_strategy, **settings}
    enabled = Enabled(target, {key: value for key, value in given.items() if value is not _UNSET})
    with _changing:
        _stack.append(enabled)
        if not _installed:
            present = GenerationMixin.generate
            wrapper = present if _reaches_wrapper(present) else _wrap(present)
            _installed.append((wrapper, present))
            GenerationMixin.generate = wrapper
            GenerationMixin.init_continuous_batching = _without_speculation(GenerationMixin.init_continuous_batching)
    return enabled


def disable(model: PreTrainedModel | None = None) -> None:
    """Undo the latest `enable` of `model`, or the latest of all if None. Does nothing if there is none.

    Also frees what compiled and captured rounds keep between calls, see `release`.
    """
    release(model)
    targets = [None] if model is None else generating_parts(model)
    with _changing:
        latest = (one for one in reversed(_stack) if one.alive)
        _remove(next((one for one in latest if model is None or any(map(one.is_for, targets))), None))


def _remove(enabled: Enabled | None) -> None:
    """Undo an `enable`, and those of models that are gone."""
    with _changing:
        if enabled is not None:
            enabled.forget()
        _stack[:] = [other for other in _stack if other is not enabled and other.alive]
        if not _stack and _installed:
            wrapper, replaced = _installed.pop()
            if GenerationMixin.generate is wrapper:
                GenerationMixin.generate = replaced
            del GenerationMixin.init_continuous_batching  # it was inherited


def _reaches_wrapper(function: Any) -> bool:
    """Whether a function is a wrapper of an earlier `enable`, or another package's wrapper around one."""
    while function is not None and function not in _wrappers:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def _wrap(replaced: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replaced)
    def _generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        in_force = [enabled for enabled in tuple(_stack) if enabled.covers(self)]
        if not in_force:
            return replaced(self, *args, **kwargs)
        call = {**dict(zip(_parameters, args, strict=False)), **kwargs}
        settings = _settings(self, call, in_force)
        strategy = settings.pop("generation_strategy", None)
        call.pop("generation_strategy", None)
        custom = call.get("custom_generate")
        if strategy is None and custom is None and not _is_draft_call(self, call):
            _check_strategy_is_not_missing(self, call)
        if strategy is not None and custom is not None and "generation_strategy" in kwargs:
            raise ValueError(
                f"generation_strategy={strategy!r} together with custom_generate: pass only one of them, or bind "
                "the strategy with custom_generate=hf_specdec.SpeculativeDecoding(draft, strategy=...)."
            )
        if strategy is not None and custom is None:
            call = _speculative_call(self, strategy, settings, call)
        with KeptTorchState(), _running_now(self):
            return replaced(self, **call)

    _wrappers.add(_generate)
    return _generate


def _without_speculation(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the start of continuous batching (`generate_batch`, `transformers serve`) to refuse it with speculation."""

    @wraps(replaced)
    def _init(
        self: PreTrainedModel, generation_config: GenerationConfig | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        in_force = [enabled for enabled in tuple(_stack) if enabled.covers(self)]
        strategy = _settings(self, {"generation_config": generation_config}, in_force).get("generation_strategy")
        if strategy is not None:
            raise ValueError(
                f"generation_strategy={strategy!r} with continuous batching (generate_batch, transformers serve "
                "--continuous-batching): its loop uses no draft, so call generate, or hf_specdec.disable(model) first."
            )
        return replaced(self, generation_config, *args, **kwargs)

    return _init


def _speculative_call(
    model: PreTrainedModel, strategy: str, settings: dict[str, Any], call: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments, with the package's own replaced by the decoding loop of the strategy."""
    if "assistant_model" in call:
        add_dropped(model, call)
    for name in ARGUMENTS:
        call.pop(name, None)
    check_flags(synced_gpus=call.get("synced_gpus"), token_healing=_configured(model, call, "token_healing"))
    check_cache_implementation(model, _configured(model, call, "cache_implementation"))
    settings |= _own_drafter(model, call)
    draft = settings.pop("assistant_model", None)
    tokenizer = call.pop("tokenizer", None)
    decoding = SpeculativeDecoding(
        draft,
        strategy,
        streamer=call.get("streamer"),
        tokenizer=tokenizer,
        assistant_tokenizer=call.pop("assistant_tokenizer", None),
        media=media_of(call),
        **settings,
    )
    for name in _unused(model, call):
        raise ValueError(
            f"{name}={call[name]!r} is not an argument of generate or of this model, nor a speculation setting: "
            f"choose among {', '.join(FIELDS)}, or leave it out."
        )
    _add_stop_strings(model, call, tokenizer)
    return {**call, "custom_generate": decoding}


def _own_drafter(model: PreTrainedModel, call: dict[str, Any]) -> dict[str, Any]:
    """The drafter that transformers' arguments select; removes them from the call, which would refuse batches."""
    chosen = {}
    for name, (value, drafter) in ASKED_FOR_BY.items():
        if _configured(model, call, name) == value:
            chosen["drafter"] = drafter
            call.pop(name, None)
            if (given := call.get("generation_config")) is not None:
                call["generation_config"] = given = copy.deepcopy(given)
                setattr(given, name, False)  # None would be filled in from the model's configuration
            elif hasattr(model.generation_config, name):
                call[name] = False
    return chosen


def _settings(model: PreTrainedModel, call: dict[str, Any], in_force: list[Enabled]) -> dict[str, Any]:
    """The package's arguments by precedence: the call, `generation_config`, active enables.

    When a draft model is called from within `generate`, only the arguments of that call count, since transformers'
    assisted generation passes the target's `generation_config` on to the draft.
    """
    drafting = _is_draft_call(model, call)
    configs = () if drafting else (call.get("generation_config"), model.generation_config)
    defaults = {} if drafting else {key: value for enabled in in_force for key, value in enabled.defaults.items()}
    settings = {}
    for name in ARGUMENTS:
        stored = [value for config in configs if (value := _stored(config, name)) is not None]
        if name in call and (call[name] is not None or name == "generation_strategy"):
            settings[name] = call[name]
        elif stored:
            settings[name] = stored[0]
        elif name in defaults:
            settings[name] = defaults[name]
    if any(defaults.get(name) is not None for name in ("assistant_model", "drafter")):
        settings.setdefault("generation_strategy", "speculative")
    return settings


def _stored(config: GenerationConfig | None, name: str) -> Any:
    """A setting in a `generation_config`; None if it is unset, or transformers' default in one that is filled in."""
    value, is_filled = getattr(config, name, None), getattr(config, "assistant_lookbehind", None) is not None
    return None if is_filled and value == _FILLED_IN.get(name) else value


def _configured(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """An argument of transformers by precedence: the call, `generation_config`, the model's config; None if unset."""
    configs = (call.get("generation_config"), model.generation_config)
    values = (call.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _unused(model: PreTrainedModel, call: dict[str, Any]) -> list[str]:
    """The arguments that neither `generate` nor, by transformers' own check, the model accepts."""
    configs = (GenerationConfig(), call.get("generation_config"), model.generation_config)
    known = {name for name in call if name in KNOWN or any(hasattr(config, name) for config in configs)}
    return unknown_arguments(model, {name: value for name, value in call.items() if name not in known})


def _check_strategy_is_not_missing(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Refuse the package's settings in a call without a strategy.

    Raises:
        ValueError: names the setting and its value, and says what to do instead.
    """
    given = {name: call[name] for name in FIELDS if name in call}
    for name in _unused(model, {**given, "generation_config": call.get("generation_config")}) if given else ():
        raise ValueError(
            f"{name}={call[name]!r} without a generation_strategy: add generation_strategy='speculative', for "
            f"example, or leave {name} out."
        )


def _add_stop_strings(model: PreTrainedModel, call: dict[str, Any], tokenizer: Any) -> None:
    """Turn `stop_strings` into a criterion, since `generate` does not pass the tokenizer to custom loops."""
    stop_strings = _configured(model, call, "stop_strings")
    if stop_strings is None or tokenizer is None:
        return
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    call.update(stop_strings=None, stopping_criteria=criteria)


def _is_draft_call(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Whether this call comes from `generate` for drafting, not from the caller's streamer or criterion."""
    running = _running.get()
    return bool(running) and (
        id(model) not in running or bool(getattr(call.get("generation_config"), "is_assistant", False))
    )


@contextmanager
def _running_now(model: PreTrainedModel) -> Iterator[None]:
    """Mark `model` as running, so that nested calls of `generate` are recognized."""
    before = _running.get()
    try:
        _running.set(before | {id(model)})
        yield
    finally:
        _running.set(before)
