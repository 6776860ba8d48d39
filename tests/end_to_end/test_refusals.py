"""What is not supported is refused before the first decoder pass, with the argument, its value and the way out."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers import recurrent_families
from helpers.identity import same_as_plain
from helpers.models import PAD, Passes, llama, noisy, prompts, t5
from helpers.word_tokenizer import word_tokenizer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, QuantizedLayer

import hf_specdec
from hf_specdec import SpeculationConfig, SpeculativeDecoding, checks
from hf_specdec.models.cache_names import CACHE_NAME, cache_argument

pytestmark = pytest.mark.usefixtures("enabled")


def refused(target: PreTrainedModel, draft: PreTrainedModel | None, *words: str, **call: Any) -> None:
    """The call raises a message with all these words, and neither model has made a decoder pass."""
    call = {"generation_strategy": "speculative", "max_new_tokens": 4, **call}
    if "input_ids" not in call and "inputs_embeds" not in call:
        call |= prompts(1)
    with Passes(target) as passes, pytest.raises(ValueError) as error:
        target.generate(**call, assistant_model=draft)
    assert passes.count == 0
    for word in words:
        assert word in str(error.value)


OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("generation_strategy", "contrastive", "'speculative', 'bild'"),
    ("num_assistant_tokens", 0, "at least 1"),
    ("num_assistant_tokens", -3, "at least 1"),
    ("num_assistant_tokens", 2.5, "integer"),
    ("num_assistant_tokens", True, "integer"),
    ("fallback_threshold", -0.1, "from 0"),
    ("fallback_threshold", 1.01, "to 1"),
    ("fallback_threshold", math.nan, "number"),
    ("fallback_threshold", "high", "number"),
    ("rollback_threshold", -1, "at least 0"),
    ("drafter", "beam", "'model', 'suffix'"),
    ("verification", "tree", "'token', 'block'"),
    ("entropy_threshold", 1.5, "from 0 to 1"),
    ("entropy_threshold", "low", "from 0 to 1"),
    ("assistant_confidence_threshold", 1.5, "from 0 to 1"),
    ("num_assistant_tokens", "many", "'auto'"),
    ("rollback_threshold", math.nan, "number"),
    ("lenience", 1.5, "to 1"),
    ("lenience", "much", "number"),
    ("posterior_threshold", -0.1, "at least 0"),
    ("posterior_threshold", math.nan, "number"),
    ("assistant_ensemble_weight", -0.5, "from 0"),
    ("assistant_ensemble_weight", True, "number"),
    *(
        (name, value, way_out)
        for name, way_out in {
            "generation_strategy": "'speculative', 'bild'",
            "num_assistant_tokens": "integer",
            "lenience": "to 1",
            "drafter": "'model', 'suffix'",
            "compile": "boolean",
        }.items()
        for value in (np.array([1, 2]), np.array(["bild", "auto"]), ["auto"], {"bild": 1}, torch.ones(2))
    ),
]


@pytest.mark.parametrize(("name", "value", "way_out"), OUT_OF_RANGE, ids=lambda value: str(value)[:20])
def test_values_out_of_range(pair, name: str, value: Any, way_out: str) -> None:
    """Alike in a call, in `enable`, in `SpeculativeDecoding` and in the config itself."""
    refused(*pair, f"{name}={value!r}", way_out, **{"generation_strategy": "bild", name: value})
    field = "strategy" if name == "generation_strategy" else name
    makers: list[Callable[[], Any]] = [
        lambda: hf_specdec.enable(pair[0], **{name: value}),
        lambda: SpeculativeDecoding(pair[1], **{field: value}),
        lambda: SpeculationConfig(**{field: value}),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=way_out):
            make()


def test_numbers_of_numpy_are_numbers(pair) -> None:
    """Control: they become Python's, which a compiler takes for constants."""
    config = SpeculationConfig("bild", np.int64(3), fallback_threshold=np.float32(0.5), rollback_threshold=np.int8(0))
    numbers = config.num_assistant_tokens, config.fallback_threshold, config.rollback_threshold
    assert numbers == (3, 0.5, 0) and [type(number) for number in numbers] == [int, float, int]


@pytest.mark.parametrize("settings", [
    {"fallback_threshold": 0, "rollback_threshold": 0},
    {"fallback_threshold": 1.0, "rollback_threshold": math.inf, "num_assistant_tokens": 1},
    {"strategy": "lenient", "lenience": 0},
    {"strategy": "typical", "posterior_threshold": 0},
    {"strategy": "ensemble", "assistant_ensemble_weight": 0},
])  # fmt: skip
def test_the_limits_themselves_are_values(pair, settings: dict[str, Any]) -> None:
    """Control: 0 is never "unset"."""
    config = SpeculationConfig(**{"strategy": "bild", **settings})
    assert {name: getattr(config, name) for name in settings} == settings
    call = {"generation_strategy": settings.get("strategy", "bild"), **settings}
    call.pop("strategy", None)
    output = pair[0].generate(**prompts(1), max_new_tokens=4, assistant_model=pair[1], **call)
    assert output.shape[1] <= 13


@pytest.mark.parametrize("name", ["rollback_treshold", "gamma"])
def test_an_unknown_field(pair, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=3.*rollback_threshold"):
        hf_specdec.enable(pair[0], **{name: 3})
    with pytest.raises(ValueError, match=f"{name}=3.*rollback_threshold"):
        SpeculativeDecoding(pair[1], **{name: 3})
    refused(*pair, f"{name}=3", "rollback_threshold", **{name: 3})


def test_what_the_model_itself_takes_is_no_unknown_field(pair) -> None:
    """Control: arguments of the model's forward pass, and of an encoder, go through."""
    settings: dict[str, Any] = {"max_new_tokens": 4, "generation_strategy": "speculative"}
    pair[0].generate(**prompts(1), position_ids=torch.arange(9)[None], assistant_model=pair[1], **settings)
    target = t5()
    pair_of_t5 = {"assistant_model": noisy(target), "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}
    target.generate(**prompts(1), **pair_of_t5, **settings)


@pytest.mark.parametrize("call", [{}, {"generation_strategy": None}])
def test_a_setting_without_a_strategy(pair, call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fallback_threshold=0.5 without a generation_strategy"):
        pair[0].generate(**prompts(1), max_new_tokens=2, assistant_model=pair[1], fallback_threshold=0.5, **call)


@pytest.mark.parametrize("draft", ["gpt2", torch.nn.Linear(2, 2), llama().model], ids=["name", "layer", "headless"])
def test_a_draft_that_is_no_model(pair, draft: Any) -> None:
    words = "assistant_model='gpt2'" if draft == "gpt2" else f"assistant_model={type(draft).__name__}"
    refused(pair[0], draft, words, "from_pretrained")
    with pytest.raises(ValueError, match=f"{words}.*from_pretrained"):
        hf_specdec.enable(pair[0], assistant_model=draft)
    with pytest.raises(ValueError, match=f"{words}.*from_pretrained"):
        SpeculativeDecoding(draft)


@pytest.mark.parametrize("model", ["gpt2", LlamaForCausalLM], ids=str)
def test_a_target_that_is_not_loaded(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model=.* is not a loaded model: .* leave it out"):
        hf_specdec.enable(model)


def test_the_strategy_of_the_hook_by_its_other_name(pair) -> None:
    with pytest.raises(ValueError, match=r"generation_strategy='bild'.*SpeculativeDecoding\(draft, strategy='bild'\)"):
        SpeculativeDecoding(pair[1], generation_strategy="bild")


OTHER_MODES = {
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "max_matching_ngram_size": 3,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    *(
        ({name: value}, [f"{name}={value!r}", f"leave {name} out", "without speculation"])
        for name, value in OTHER_MODES.items()
    ),
    ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha=0.6", "leave penalty_alpha out", "without speculation"]),
    *(
        ({"cache_implementation": name}, [f"cache_implementation='{name}'", "'dynamic'", "without speculation"])
        for name in ("quantized", "paged", "offloaded", "offloaded_static")
    ),
    *(
        ({name: True, "return_dict_in_generate": True}, [f"{name}=True", f"leave {name} out"])
        for name in ("output_attentions", "output_hidden_states")
    ),
    *(
        ({"drafter": name, "generation_strategy": "ensemble"}, [f"drafter={name!r}", "drafter='model'"])
        for name in ("suffix", "hybrid")
    ),
    ({"synced_gpus": True}, ["synced_gpus=True"]),
    ({"num_beams": 3}, ["num_beams=3", "num_beams=1"]),
    ({"token_healing": True}, ["token_healing=True", "model.heal_tokens(input_ids, tokenizer)"]),
    ({"inputs_embeds": torch.zeros(1, 4, 32, dtype=torch.float64)}, ["inputs_embeds", "pass the input_ids as well"]),
    (
        {"logits_processor": [ClassifierFreeGuidanceLogitsProcessor(1.5)]},
        ["logits_processor=[ClassifierFreeGuidanceLogitsProcessor]", "two rows of scores", "leave it out"],
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=lambda value: next(iter(value)))
def test_what_a_call_can_not_have(pair, call: dict[str, Any], words: list[str]) -> None:
    refused(*pair, *words, **call)


def test_a_penalty_that_means_nothing_in_sampling(pair) -> None:
    """Control: there plain `generate` doesn't read it either."""
    call = {**prompts(1), "max_new_tokens": 4, "penalty_alpha": 0.6, "top_k": 4, "do_sample": True}
    assert pair[0].generate(**call, assistant_model=pair[1], generation_strategy="speculative").shape[1] <= 13


class Halves(QuantizedLayer):
    """A quantized layer without a backend: it "quantizes" by rounding to half precision."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.half()

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor.double()


Refused = tuple[PreTrainedModel, PreTrainedModel | None, dict[str, Any], tuple[str, ...]]


def quantized_cache(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Refused]:
    """Its layers inherit `is_croppable=True`, and a `crop` that leaves the quantized part behind."""
    for layers in ((Halves, Halves), (DynamicLayer, Halves)):
        cache = DynamicCache(config=target.config)
        cache.layers = [layer() for layer in layers]
        words = f"{CACHE_NAME}=DynamicCache", "Halves", "cache_implementation='dynamic'"
        yield target, draft, {CACHE_NAME: cache}, words


def states_out_of_reach(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Refused]:
    """These keep their states in their modules or in a cache of their own."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": PAD}
    own: dict[str, dict[str, Any]] = {"RecurrentGemma": {"lru_width": 16}, "Rwkv": {}, "xLSTM": {"num_heads": 2}}
    for family, settings in own.items():
        config = getattr(transformers, f"{family}Config")(**sizes, **settings)
        recurrent = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        yield recurrent, draft, {}, (f"model={family}ForCausalLM", "recurrent", "without speculation")
        yield target, recurrent, {}, (f"assistant_model={family}ForCausalLM", "recurrent", "families.md")


def states_only_with_a_text(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Refused]:
    for family in ("Mamba", "Mamba2", "FalconMamba"):
        recurrent = recurrent_families.model(family)
        cache, name = DynamicCache(config=recurrent.config), cache_argument(recurrent)
        recurrent(torch.tensor([[5, 6]]), **{name: cache}, use_cache=True)
        yield recurrent, draft, {name: cache}, (f"{name}=DynamicCache", "the length of its text", f"leave {name} out")


def without_weights(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Refused]:
    with torch.device("meta"):
        empty = llama()
    yield target, empty, {}, ("assistant_model=LlamaForCausalLM", "meta", "device_map")
    yield empty, draft, {}, ("model=LlamaForCausalLM", "meta", "device_map")
    parts = [copy.deepcopy(model) for model in (target, draft)]
    for part in parts:
        part.model.layers[1].mlp.up_proj.to("meta")
    words = "'meta' device in its part model.layers.1.mlp.up_proj"
    yield parts[0], draft, {}, ("model=LlamaForCausalLM", words)
    yield target, parts[1], {}, ("assistant_model=LlamaForCausalLM", words)


def other_models(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Refused]:
    """None, of another kind, and with vocabularies that differ by more than padding."""
    seq2seq, other, way_out = t5(), llama(vocab_size=64 + 1025), "draft of the target's kind"
    yield target, None, {}, ("assistant_model=None", "generation_strategy='speculative'", "enable(", "drafter='suffix'")
    yield target, None, {"drafter": "hybrid"}, ("assistant_model=None", "drafter='hybrid'")
    words = "assistant_model=T5ForConditionalGeneration is an encoder-decoder model", way_out
    yield target, seq2seq, {}, words
    yield seq2seq, draft, {}, ("assistant_model=LlamaForCausalLM is a decoder-only model", way_out)
    for one, another in ((target, other), (other, draft)):
        yield one, another, {}, ("assistant_model=LlamaForCausalLM", "1089", "64", "assistant_tokenizer=")
    yield target, other, {"tokenizer": word_tokenizer()}, ("assistant_tokenizer=",)
    encoding = seq2seq.encoder(input_ids=prompts(1)["input_ids"])
    words = "encoder_outputs", "pass input_ids"
    yield seq2seq, noisy(seq2seq), {"input_ids": None, "encoder_outputs": encoding}, words
    hook = SpeculativeDecoding(draft)
    yield target, draft, {"custom_generate": hook}, ("custom_generate", "SpeculativeDecoding")
    tokenizers = {"tokenizer": word_tokenizer(), "assistant_tokenizer": word_tokenizer(order=-1)}
    yield target, draft, {"generation_strategy": "ensemble", **tokenizers}, ("'ensemble'", "assistant_tokenizer")


@pytest.mark.parametrize(
    "cases", [quantized_cache, states_out_of_reach, states_only_with_a_text, without_weights, other_models]
)
def test_models_and_caches_that_can_not_speculate(pair, cases: Callable[..., Iterator[Refused]]) -> None:
    for target, draft, call, words in cases(*pair):
        refused(target, draft, *words, **call)


def test_models_whose_weights_are_split_among_processes(pair, monkeypatch) -> None:
    """Processes that hold all the weights decode on their own."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)
    same_as_plain(*pair, prompts(1), {"max_new_tokens": 4, "do_sample": False})
    for sharding, name in (("is_deepspeed_zero3_enabled", "ZeRO-3"), ("is_fsdp_managed_module", "FSDP")):
        with monkeypatch.context() as patch:
            patch.setattr(checks, sharding, lambda *model: True)
            refused(*pair, "model=LlamaForCausalLM is sharded by", name)
    draft = copy.deepcopy(pair[1])
    mlp = draft.model.layers[0].mlp
    mlp.__class__ = type("Sharded", (type(mlp), FSDPModule), {"__new__": object.__new__})
    refused(pair[0], draft, "assistant_model=LlamaForCausalLM is sharded by FSDP")


def test_padding_up_to_the_limit_is_no_difference(pair) -> None:
    """Control: 1,024 more is padding."""
    other = llama(vocab_size=64 + 1024)
    output = pair[0].generate(**prompts(1), max_new_tokens=4, assistant_model=other, generation_strategy="speculative")
    assert output.shape[1] <= 13


def test_continuous_batching_where_calls_would_speculate(pair) -> None:
    """`generate_batch` and `transformers serve --continuous-batching` run a loop of their own, which takes no draft."""
    target, draft = pair
    words = "generation_strategy='bild' with continuous batching .* hf_specdec.disable"
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="bild"), Passes(target) as passes:
        for begin in (lambda: target.generate_batch([[5, 6]], max_new_tokens=2), target.init_continuous_batching):
            with pytest.raises(ValueError, match=words):
                begin()
        draft.init_continuous_batching()
    assert passes.count == 0
    target.init_continuous_batching()
    stored = copy.deepcopy(target.generation_config)
    stored.generation_strategy = "bild"
    with pytest.raises(ValueError, match=words):
        target.init_continuous_batching(stored)


def test_after_the_last_disable_continuous_batching_is_transformers_own() -> None:
    assert "init_continuous_batching" in vars(GenerationMixin)
    hf_specdec.disable()
    assert "init_continuous_batching" not in vars(GenerationMixin)


@pytest.mark.parametrize(("package", "version", "wanted"), [
    ("transformers", "4.57.6", "transformers>=5.17,<6"),
    ("transformers", "5.16.9", "transformers>=5.17,<6"),
    ("transformers", "6.0.0.dev0", "transformers>=5.17,<6"),
    ("torch", "2.5.1+cu124", "torch>=2.6"),
])  # fmt: skip
def test_other_versions_are_refused_in_one_line(package: str, version: str, wanted: str, monkeypatch) -> None:
    monkeypatch.setattr(f"{package}.__version__", version)
    with pytest.raises(ImportError) as raised:
        hf_specdec.enable()
    line = f"{package} {version} is installed, but hf_specdec needs {wanted}: pip install '{wanted}'"
    assert str(raised.value) == line


@pytest.mark.parametrize(
    ("package", "version"),
    [("transformers", "5.17.0"), ("transformers", "5.99.1"), ("torch", "2.6.0"), ("torch", "3.0.0a0+git1f")],
)
def test_versions_within_the_range_are_not(package: str, version: str, monkeypatch) -> None:
    monkeypatch.setattr(f"{package}.__version__", version)
    with hf_specdec.enable():
        pass
