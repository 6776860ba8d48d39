"""Loads a target, its draft and their tokenizers; whatever is missing is reported in one line before heavy work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.utils import cached_file

import hf_specdec
from hf_specdec import embedded
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.auto_classes import AnyConfig, auto_class
from hf_specdec.bench.models.names import (
    REAL_MODELS,
    WHERE,
    default_draft,
    full_name,
    is_gguf,
    location,
    real_models_folder,
)
from hf_specdec.bench.models.precision import check_loaded, load_kwargs, quantize_made
from hf_specdec.bench.records import Model
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.gguf.file import read as read_gguf
from hf_specdec.gguf.weights import GgufWeight
from hf_specdec.models.better_transformer import attention_of, better_transformer_refusal, to_better_transformer
from hf_specdec.models.eagle_draft import Eagle3Draft
from hf_specdec.models.traits import describes_block_draft
from hf_specdec.models.trimmed_head import listed_tokens

# Settings of a generation_config that change what is decoded, with their neutral values.
_SAMPLING = {
    "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
_PROCESSORS = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {},
    "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0,
}  # fmt: skip


@dataclass(frozen=True)
class LoadedPair:
    """A target, possibly its draft, and their tokenizers; names are the full ones.

    `template` holds arguments of the chat template. `extractor` converts recordings to features for a target that
    transcribes speech. `synthetic` is a sentence for reports if the weights are random, otherwise None.
    `loading_seconds` holds each model's loading time by name.
    """

    target_name: str
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    draft_name: str | None = None
    draft: PreTrainedModel | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    synthetic: str | None = None
    loading_seconds: Mapping[str, float] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    extractor: Any = None

    @property
    def encoder_decoder(self) -> bool:
        return bool(self.target.config.is_encoder_decoder)

    @property
    def models(self) -> list[PreTrainedModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """The tokens that end the target's texts."""
        stored: Any = self.target.generation_config.eos_token_id
        return () if stored is None else tuple(stored) if isinstance(stored, (list, tuple)) else (int(stored),)

    def up_to_eos(self, row: list[int]) -> list[int]:
        """A row of new tokens, cut after its EOS."""
        ends = self.eos_tokens
        return row[: next((place for place, token in enumerate(row, start=1) if token in ends), len(row))]

    def describe(self) -> dict[str, Model]:
        """The models' descriptions for reports, by role."""
        found = {"target": _describe(self.target_name, self.target, self.synthetic)}
        if self.draft is not None and self.draft_name is not None:
            found["draft"] = _describe(self.draft_name, self.draft)
        return found


def load_pair(settings: Settings, *, weights: bool = True) -> LoadedPair:
    """Load the models that `settings` name; raise `BenchError` if a model, a device or a draft is not available.

    If `weights` is False, the target is loaded by `without_weights`.

    Both configurations are read before any weights, so that a wrong draft name costs no time; the target's first,
    since no draft is known for a mistyped target.
    """
    device = _device("--device", settings.device)
    draft_device = _device("--draft_device", settings.draft_device, default=device)
    target_name = full_name(settings.model_name)
    if synthetic.is_synthetic(target_name):
        return _synthetic_pair(settings, device, draft_device)
    config = _target_config(settings)
    hears = _hears(config, settings)
    draft_name = _draft_name(settings) if settings.uses_draft else None

    place: dict[str, Any] = {"device_map": settings.device_map, "offload_folder": settings.offload_folder}
    kwargs = load_kwargs(settings.precision, dtype=settings.dtype, **place)
    if draft_name is not None:
        draft_config = _draft_config("--assistant_model", draft_name, settings)
        if draft_config.is_encoder_decoder != config.is_encoder_decoder:
            raise BenchError(
                f"--assistant_model: only one of {draft_name!r} and the target {target_name!r} is an "
                "encoder-decoder model; give a draft of the target's kind"
            )
    tokenizer = _read("--model_name", target_name, AutoTokenizer)
    start = time.perf_counter()
    if weights:
        target = _load_model("--model_name", target_name, config, device, kwargs, settings.allow_pickle)
        check_loaded(target, settings.precision, settings.device_map)
    else:
        target = without_weights(config)
        with suppress(OSError):  # it is optional
            target.generation_config = GenerationConfig.from_pretrained(location(target_name)[WHERE])
    loading = {target_name: time.perf_counter() - start}
    template = settings.chat_template_kwargs
    if template and not getattr(tokenizer, "chat_template", None):
        raise BenchError(f"--chat_template_kwargs: {target_name!r} has no chat template; leave it out")
    extractor = _read("--model_name", target_name, AutoFeatureExtractor) if hears else None
    pair = LoadedPair(target_name, target, tokenizer, loading_seconds=loading, template=template, extractor=extractor)
    if draft_name is not None:
        pair = with_draft(pair, draft_name, settings, draft_device)
    if settings.better_transformer:
        better_transformer(pair)
    return pair


def without_weights(config: Any) -> PreTrainedModel:
    """A model of this configuration on the device `meta`, which has settings but cannot run."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config, trust_remote_code=False)
    return model


def load_pairs(settings: Settings, drafts: Sequence[str]) -> list[LoadedPair]:
    """Load one target with each of several drafts, all in memory at once; raises `BenchError` like `load_pair`."""
    check_target(settings)
    for name in drafts:
        _draft_config("--draft_models", full_name(name), settings)
    first = load_pair(replace(settings, assistant_model=drafts[0]))
    pairs = [first]
    for name in drafts[1:]:
        device = _device("--draft_device", settings.draft_device, default=first.target.device)
        pairs.append(with_draft(first, full_name(name), settings, device))
        if settings.better_transformer:
            better_transformer(pairs[-1])
    return pairs


def check_target(settings: Settings) -> None:
    """Raise `BenchError` if the target's configuration cannot be read."""
    if not synthetic.is_synthetic(settings.model_name):
        _target_config(settings)


def better_transformer(pair: LoadedPair) -> None:
    """Switch both models to SDPA attention; raise `BenchError` for a model that does not support it."""
    for model in pair.models:
        if refusal := better_transformer_refusal(model):
            raise BenchError(f"--better_transformer: {refusal}")
        to_better_transformer(model)


def with_draft(
    pair: LoadedPair, name: str, settings: Settings, device: torch.device, *, trim: bool = True
) -> LoadedPair:
    """Add a draft to the pair; with `trim` its head keeps only the tokens that its configuration lists."""
    kwargs = load_kwargs(settings.draft_precision, dtype=_draft_dtype(settings), argument="--draft_precision")
    config = _draft_config("--assistant_model", name, settings)
    start = time.perf_counter()
    draft = _load_model("--assistant_model", name, config, device, kwargs, settings.allow_pickle)
    check_loaded(draft, settings.draft_precision, argument="--draft_precision")
    if describes_block_draft(config):
        draft.generation_config = GenerationConfig()  # a DFlash draft has none of its own
    if trim and listed_tokens(draft.config):
        hf_specdec.trim_draft_head(draft)
    loading = {**pair.loading_seconds, name: time.perf_counter() - start}
    reads_states = isinstance(draft, Eagle3Draft) or describes_block_draft(config)
    draft_tokenizer = pair.tokenizer if reads_states else _read("--assistant_model", name, AutoTokenizer)
    return replace(pair, draft_name=name, draft=draft, draft_tokenizer=draft_tokenizer, loading_seconds=loading)


def with_trimmed_head(pair: LoadedPair, token_ids: Sequence[int]) -> LoadedPair:
    """The pair with a copy of its draft that proposes only these tokens and shares all weights except the head's."""
    assert pair.draft is not None
    shared = {id(tensor): tensor for tensor in (*pair.draft.parameters(), *pair.draft.buffers())}
    draft = deepcopy(pair.draft, shared)
    hf_specdec.trim_draft_head(draft, token_ids)
    return replace(pair, draft=draft, draft_name=f"{pair.draft_name}, head of {len(token_ids):,} tokens")


def _synthetic_pair(settings: Settings, device: torch.device, draft_device: torch.device) -> LoadedPair:
    spec = synthetic.parse(settings.model_name)
    for argument in ("assistant_model", "device_map", "offload_folder"):
        if (value := getattr(settings, argument)) is not None:
            raise BenchError(f"--{argument}: {str(value)!r} is not possible with a synthetic target; leave it out")
    dtypes = [
        synthetic.default_dtype(place) if name == "auto" else getattr(torch, name)
        for place, name in ((device, settings.dtype), (draft_device, _draft_dtype(settings)))
    ]
    target, draft, sentence = synthetic.build(spec, device, dtypes[0], draft_device, dtypes[1], settings.seed)
    quantize_made(target, settings.precision)
    quantize_made(draft, settings.draft_precision, argument="--draft_precision")
    # Its ids are valid in every shape; their meaning does not matter here.
    tokenizer = _read("--model_name", "target", AutoTokenizer)
    pair = LoadedPair(settings.model_name, target, tokenizer, synthetic=sentence)
    if settings.uses_draft:
        name = f"{settings.model_name} (draft {spec.width}x{spec.layers})"
        pair = replace(pair, draft_name=name, draft=draft, draft_tokenizer=tokenizer)
    if settings.better_transformer:
        better_transformer(pair)
    return pair


def _draft_dtype(settings: Settings) -> str:
    return settings.draft_dtype if settings.draft_dtype != "auto" else settings.dtype


def _target_config(settings: Settings) -> Any:
    return _read("--model_name", full_name(settings.model_name), AutoConfig)


def _draft_name(settings: Settings) -> str:
    name = settings.assistant_model or default_draft(settings.model_name)
    if name is None:
        raise BenchError(
            f"--assistant_model: not given, and no draft is known for the target {settings.model_name!r}; "
            "name one with --assistant_model"
        )
    return full_name(name)


def _draft_config(argument: str, name: str, settings: Settings) -> Any:
    """A draft's configuration; raises `BenchError` for a DFlash draft without `--drafter dflash`, and the reverse."""
    config = _read(argument, name, AnyConfig)
    if (blocks := describes_block_draft(config)) != ("dflash" in settings.values("drafter")):
        raise BenchError(
            f"{argument}: {name!r} is {'a' if blocks else 'not a'} DFlash draft; "
            f"{'add' if blocks else 'leave out'} --drafter dflash"
        )
    return config


def _device(argument: str, name: str | None, default: torch.device | None = None) -> torch.device:
    if name is None:
        fallback = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return default if default is not None else fallback
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BenchError(
            f"{argument}: {name!r} can't be used here ({_first_line(error)}); "
            "give a device that this machine has, such as cpu"
        ) from error
    return device


def _read(argument: str, name: str, source: Any) -> Any:
    """Read a configuration or tokenizer with the Auto class `source`."""
    try:
        # None would ask on the terminal whether to run code that comes with the model.
        found = source.from_pretrained(**location(name), trust_remote_code=False)
        # transformers drops the template if another one is saved in the file's folder.
        if source is AutoTokenizer and is_gguf(name) and not found.chat_template:
            found.chat_template = read_gguf(gguf_path(name)).metadata.get("tokenizer.chat_template")
        return found
    # Libraries raise many kinds of errors here (missing files, unknown architectures, damaged JSON); all mean that
    # the model cannot be read.
    except Exception as error:
        raise _unreachable(argument, name, error) from error


def _load_model(
    argument: str, name: str, config: Any, device: torch.device, kwargs: dict[str, Any], allow_pickle: bool
) -> PreTrainedModel:
    """Load weights from safetensors or GGUF, which hold only numbers; from pickles only on request."""
    if kwargs.pop("blocks", False):
        return _in_blocks(argument, name, device, kwargs["dtype"])
    # transformers widens the weights of GGUF files, which have their own formats.
    quantized = kwargs.pop("quantization_config", None) if is_gguf(name) else None
    formats = {} if allow_pickle or is_gguf(name) else {"use_safetensors": True}
    try:
        model = auto_class(config).from_pretrained(**location(name), trust_remote_code=False, **formats, **kwargs)
    except Exception as error:
        if formats and "safetensors" in str(error):
            raise BenchError(
                f"{argument}: {name!r} has no readable safetensors weights ({_first_line(error)}); give a model that "
                "has, or --allow_pickle if you trust the source of its weights"
            ) from error
        raise _unreachable(argument, name, error) from error
    if quantized is not None:
        quantize_made(model, quantized.weights, argument=argument)
    # A model that accelerate has spread over devices must not be moved.
    return model.eval() if "device_map" in kwargs else model.to(device).eval()


def gguf_path(name: str) -> Path:
    """The local path of a full name's GGUF file, downloaded from the hub if necessary."""
    place = location(name)
    return Path(str(cached_file(str(place[WHERE]), place["gguf_file"])))


def _in_blocks(argument: str, name: str, device: torch.device, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load a model from a GGUF file, local or on the hub, keeping the weights in its blocks."""
    if not is_gguf(name) or device.type != "cpu":
        what = "a GGUF file" if device.type == "cpu" else "a CPU"
        raise BenchError(f"{argument}: precision gguf needs {what}, got {name!r} on {device}; leave the precision out")
    try:
        return hf_specdec.load_gguf(gguf_path(name), dtype=dtype if isinstance(dtype, torch.dtype) else None)
    except Exception as error:
        raise _unreachable(argument, name, error) from error


def _hears(config: Any, settings: Settings) -> bool:
    """Whether the target transcribes speech; raises `BenchError` if the task does not support it."""
    if config.model_type not in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return False
    if config.model_type == "whisper" and settings.task == "draft":
        return True
    raise BenchError(
        f"--model_name: {settings.model_name!r} transcribes speech, and all tasks have text prompts (except draft, "
        "for Whisper); give a model that reads text, or use this one from Python"
    )


def _unreachable(argument: str, name: str, error: Exception) -> BenchError:
    if name.lower() in REAL_MODELS:
        return BenchError(f"{argument}: {name!r} is not here yet; `make real` downloads it to {real_models_folder()}")
    if is_gguf(name) and (find_spec("gguf") is None or find_spec("accelerate") is None):
        return BenchError(f"{argument}: {name!r} needs gguf and accelerate; pip install 'hf_specdec[gguf]'")
    # transformers would say that such a name is not valid for the hub.
    as_path = name.count("/") < 2 if is_gguf(name) else name.count("/") > 1
    missing = (as_path or name.startswith(("/", ".", "~"))) and not Path(name).exists()
    reason = f"there is no such {'file' if is_gguf(name) else 'folder'}" if missing else _first_line(error)
    return BenchError(
        f"{argument}: {name!r} can't be loaded ({reason}); give a local folder or GGUF file, the name of a model on "
        "the hub that this machine can reach, or one of the embedded models: " + ", ".join(embedded.names())
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _describe(name: str, model: PreTrainedModel, synthetic: str | None = None) -> Model:
    dtype = str(model.dtype).removeprefix("torch.")
    weights = getattr(getattr(model.config, "quantization_config", None), "weights", None)
    weights = (
        " and ".join(sorted({weight.kind for weight in model.parameters() if isinstance(weight, GgufWeight)}))
        or weights
    )
    dtype = dtype if weights is None else f"{weights} weights, {dtype}"
    parameters, kind = model.num_parameters(), type(model).__name__
    sampling, processors = sampling_settings(model), _generation_settings(model, _PROCESSORS)
    device = "not loaded" if model.device.type == "meta" else str(model.device)
    return Model(name, kind, parameters, dtype, device, attention_of(model), synthetic, sampling, processors)


def sampling_settings(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of a model's generation_config that change how tokens are drawn."""
    return _generation_settings(model, _SAMPLING)


def _generation_settings(model: PreTrainedModel, names: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model's generation_config that have an effect; lists of tokens are replaced by their length."""
    values = {name: getattr(model.generation_config, name, None) for name in names}
    told = {name: value for name, value in values.items() if value not in (None, False, names[name])}
    return {name: value if isinstance(value, (int, float)) else f"of {len(value)}" for name, value in told.items()}
