"""`enable` and `disable`: strategies as arguments of `model.generate`, and nothing else touched.

While at least one enable is in force, `GenerationMixin.generate` stands behind a thin wrapper that takes the
package's arguments out of the call and passes a `SpeculativeDecoding` to transformers' own `custom_generate`
hook. Models keep no trace; classes with a `generate` of their own get it where they call their parent's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any
from weakref import ref

from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specdec.checks import check_cache_implementation, check_is_model, check_synced_gpus
from hf_specdec.config import FIELDS, SpeculationConfig, check_fields
from hf_specdec.generation import SpeculativeDecoding
from hf_specdec.prepared.engine_store import release

ARGUMENTS = ("assistant_model", "generation_strategy", *FIELDS)
_UNSET: Any = object()

_parameters = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]
# `generate` takes these out of its keyword arguments by name.
KNOWN = frozenset({*_parameters, "tokenizer", "assistant_tokenizer", "trust_remote_code"})
# The ids of the models whose `generate` this context is inside of.
_running: ContextVar[frozenset[int]] = ContextVar("hf_specdec_running", default=frozenset())


class Enabled:
    """One `enable` in force. As a context manager it is undone on leaving."""

    def __init__(self, model: PreTrainedModel | None, defaults: dict[str, Any]) -> None:
        self._model = None if model is None else ref(model)
        self.defaults = defaults

    def covers(self, model: object) -> bool:
        """Whether a model's calls are concerned."""
        return self._model is None or self._model() is model

    def is_for(self, model: object | None) -> bool:
        """Whether this very enable names `model` (None: every model)."""
        return self._model is None if model is None else self._model is not None and self._model() is model

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self)


_stack: list[Enabled] = []
# The wrapper in place and what it replaced: transformers' own `generate`, or another package's wrapper of it.
_installed: list[tuple[Callable[..., Any], Callable[..., Any]]] = []


def enable(
    model: PreTrainedModel | None = None,
    *,
    assistant_model: PreTrainedModel | None = _UNSET,
    generation_strategy: str | None = _UNSET,
    **settings: Any,
) -> Enabled:
    """Let `generate` take `generation_strategy` and its settings, for one model or (None) for all.

    Args:
        model: the target concerned; held weakly.
        assistant_model, generation_strategy: defaults of every later call; with both, calls that say nothing
            speculate too, and `generation_strategy=None` in a call opts out.
        settings: further defaults, the fields of `SpeculationConfig`.

    Returns:
        A handle that can be used as a context manager; otherwise `disable` undoes it. Enables nest: later ones
        override earlier ones setting by setting.

    Raises:
        ValueError: an unknown strategy or field, a value out of range, or a draft that is no model.
    """
    check_fields(settings)
    if assistant_model is not _UNSET and assistant_model is not None:
        check_is_model(assistant_model)
    if generation_strategy is _UNSET or generation_strategy is None:
        SpeculationConfig(**settings)
    else:
        SpeculationConfig(generation_strategy, **settings)
    given = {"assistant_model": assistant_model, "generation_strategy": generation_strategy, **settings}
    enabled = Enabled(_base(model), {key: value for key, value in given.items() if value is not _UNSET})
    _stack.append(enabled)
    if not _installed:
        wrapper = _wrap(GenerationMixin.generate)
        _installed.append((wrapper, GenerationMixin.generate))
        GenerationMixin.generate = wrapper
    return enabled


def disable(model: PreTrainedModel | None = None) -> None:
    """Undo the latest `enable` of a model; without one, the latest of all. Nothing happens where there is none.

    What compiled and captured rounds keep between calls is given back, see `release`.
    """
    release(None if model is None else _base(model))
    for enabled in reversed(_stack):
        if model is None or enabled.is_for(_base(model)):
            _remove(enabled)
            return


def _remove(enabled: Enabled) -> None:
    if enabled in _stack:
        _stack.remove(enabled)
    if not _stack and _installed:
        wrapper, replaced = _installed.pop()
        if GenerationMixin.generate is wrapper:
            GenerationMixin.generate = replaced


def _base(model: Any) -> Any:
    """The model whose `generate` does the work: adapters (PEFT) wrap it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _wrap(replaced: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replaced)
    def _generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        in_force = [enabled for enabled in _stack if enabled.covers(self)]
        if not in_force:
            return replaced(self, *args, **kwargs)
        call = {**dict(zip(_parameters, args, strict=False)), **kwargs}
        settings = _settings(self, call, in_force)
        strategy = settings.pop("generation_strategy", None)
        call.pop("generation_strategy", None)
        custom = call.get("custom_generate")
        if strategy is None and custom is None and not _drafts_for_another(self, call):
            _check_strategy_is_not_missing(self, call)
        if strategy is not None and custom is not None and "generation_strategy" in kwargs:
            raise ValueError(
                f"generation_strategy={strategy!r} together with custom_generate: give one of the two, or bind the "
                "strategy by custom_generate=hf_specdec.SpeculativeDecoding(draft, strategy=...)."
            )
        if strategy is not None and custom is None:
            call = _speculative_call(self, strategy, settings, call)
        with _running_now(self):
            return replaced(self, **call)

    return _generate


def _speculative_call(
    model: PreTrainedModel, strategy: str, settings: dict[str, Any], call: dict[str, Any]
) -> dict[str, Any]:
    """A call's arguments with the strategy's loop in place of the package's own arguments."""
    for name in ARGUMENTS:
        call.pop(name, None)
    check_synced_gpus(call.get("synced_gpus"))
    check_cache_implementation(model, _configured(model, call, "cache_implementation"))
    draft = settings.pop("assistant_model", None)
    tokenizer = call.pop("tokenizer", None)
    decoding = SpeculativeDecoding(
        draft,
        strategy,
        streamer=call.get("streamer"),
        tokenizer=tokenizer,
        assistant_tokenizer=call.pop("assistant_tokenizer", None),
        **settings,
    )
    for name in _unused(model, call):
        raise ValueError(
            f"{name}={call[name]!r} is no argument of generate or of this model, and no speculation setting: choose "
            f"among {', '.join(FIELDS)}, or leave it out."
        )
    _add_stop_strings(model, call, tokenizer)
    return {**call, "custom_generate": decoding}


def _settings(model: PreTrainedModel, call: dict[str, Any], in_force: list[Enabled]) -> dict[str, Any]:
    """The package's arguments by precedence: the call, `generation_config`, the enables in force.

    In a draft's call only its own arguments count: transformers' assisted generation passes the target's
    `generation_config` on to its draft.
    """
    drafting = _drafts_for_another(model, call)
    configs = () if drafting else (call.get("generation_config"), model.generation_config)
    defaults = {} if drafting else {key: value for enabled in in_force for key, value in enabled.defaults.items()}
    settings = {}
    for name in ARGUMENTS:
        stored = [value for config in configs if (value := getattr(config, name, None)) is not None]
        if name in call and (call[name] is not None or name == "generation_strategy"):
            settings[name] = call[name]
        elif stored:
            settings[name] = stored[0]
        elif name in defaults:
            settings[name] = defaults[name]
    return settings


def _configured(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """An argument of transformers by its precedence: the call, `generation_config`, the model's own; None: unset."""
    configs = (call.get("generation_config"), model.generation_config)
    return call.get(name) or next((value for config in configs if (value := getattr(config, name, None))), None)


def _unused(model: PreTrainedModel, call: dict[str, Any]) -> Iterator[str]:
    """The arguments that neither `generate` nor the model knows, as transformers itself judges the latter."""
    configs = (GenerationConfig(), call.get("generation_config"), model.generation_config)
    for name, value in call.items():
        if name in KNOWN or any(hasattr(config, name) for config in configs):
            continue
        try:
            model._validate_model_kwargs({name: value})
        except ValueError:
            yield name


def _check_strategy_is_not_missing(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Refuse settings of ours in a call that names no strategy and finds none.

    Raises:
        ValueError: names the setting, its value and the way out.
    """
    given = {name: call[name] for name in FIELDS if name in call}
    for name in _unused(model, {**given, "generation_config": call.get("generation_config")}) if given else ():
        raise ValueError(
            f"{name}={call[name]!r} without a generation_strategy: add generation_strategy='speculative' or 'bild', "
            f"or leave {name} out."
        )


def _add_stop_strings(model: PreTrainedModel, call: dict[str, Any], tokenizer: Any) -> None:
    """Turn `stop_strings` into a criterion, since `generate` keeps the tokenizer from custom loops."""
    stop_strings = _configured(model, call, "stop_strings")
    if stop_strings is None or tokenizer is None:
        return
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    call.update(stop_strings=None, stopping_criteria=criteria)


def _drafts_for_another(model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Whether this is a draft's call from within `generate`, and not one by a streamer or criterion of the caller's."""
    running = _running.get()
    return bool(running) and (
        id(model) not in running or bool(getattr(call.get("generation_config"), "is_assistant", False))
    )


@contextmanager
def _running_now(model: PreTrainedModel) -> Iterator[None]:
    """Mark calls of `generate` from within one."""
    token = _running.set(_running.get() | {id(model)})
    try:
        yield
    finally:
        _running.reset(token)
