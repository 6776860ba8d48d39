"""Every precision of target and draft against the target's own plain run; models spread over devices."""

import itertools
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from helpers import families
from helpers.identity import speculated
from helpers.resolution import resolution
from optimum.quanto.library.extensions import get_extension
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import hf_specdec
from hf_specdec.bench.models import precision
from hf_specdec.bench.models.precision import check_loaded, load_kwargs, quantized_layers
from hf_specdec.bench.running.divergence import divergence, next_logits
from hf_specdec.bench.settings import BenchError
from hf_specdec.models.better_transformer import to_better_transformer
from hf_specdec.models.cache_names import CACHE_NAME, cache_of
from hf_specdec.models.traits import pass_mode

NEW_TOKENS = 16
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
# (precision, dtype)
PRECISIONS: tuple[tuple[str | None, str], ...] = (
    (None, "float32"), (None, "bfloat16"), (None, "float16"), ("int8", "float32"), ("int4", "float32"),
    ("int8", "bfloat16"), ("int4", "bfloat16"),
)  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Any:
    """`load(family, role, **arguments of load_kwargs)`, from disk, as the script does it; kept for later tests."""
    folder = tmp_path_factory.mktemp("pairs")

    @cache
    def loaded(family: str, role: str, weights: str | None = None, **settings: Any) -> PreTrainedModel:
        path = folder / family
        if not path.exists():
            for name, model in zip(("target", "draft"), families.pair(family, dtype=torch.float32), strict=True):
                model.save_pretrained(path / name)
        auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
        model = auto.from_pretrained(path / role, **load_kwargs(weights, **settings)).eval()
        check_loaded(model, weights, settings.get("device_map"))
        return model

    return loaded


def _new_tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **settings: Any) -> tuple[Any, Any]:
    out = model.generate(**inputs, **GREEDY, **settings, return_dict_in_generate=True)
    return out.sequences[:, -NEW_TOKENS:].tolist(), getattr(out, "speculation", None)


def _exceeds(model: PreTrainedModel, inputs: dict[str, Tensor], ours: list[list[int]], plain: list[list[int]]) -> float:
    """The largest margin or gap at the rows' first divergences, in units of what the model resolves; 0 if equal."""
    largest = 0.0
    for row in range(len(plain)):
        alone = {key: value[row : row + 1] for key, value in inputs.items()}
        found = divergence(model, alone, ours[row], plain[row])
        if found is not None:
            bound = resolution(model, next_logits(model, alone, plain[row][: found.position]))
            largest = max(largest, found.margin / bound, (found.gap or 0.0) / bound)
    return largest


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("target_precision", PRECISIONS, ids=str)
def test_tokens_are_the_plain_run_s_or_part_at_a_near_tie(
    load: Any, family: str, target_precision: tuple[str | None, str]
) -> None:
    target = load(family, "target", target_precision[0], dtype=target_precision[1])
    inputs = families.prompts(3)
    plain, _ = _new_tokens(target, inputs)
    rates = []
    # Each pair of precisions on one of the two families.
    for weights, dtype in PRECISIONS[(PRECISIONS.index(target_precision) + (family == "t5")) % 2 :: 2]:
        draft = load(family, "draft", weights, dtype=dtype)
        with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
            ours, stats = _new_tokens(target, inputs)
        assert _exceeds(target, inputs, ours, plain) <= 1, (weights, dtype)
        if target_precision == (None, "float32"):
            assert ours == plain, (weights, dtype)
        rates.append(stats.acceptance_rate)
    assert all(0 < rate < 1 for rate in rates), rates


@pytest.mark.parametrize(("weights", "dtype"), [("int8", "float32"), ("int4", "float32"), (None, "bfloat16")])
def test_bound_sees_a_target_of_another_precision(load: Any, weights: str | None, dtype: str) -> None:
    """Negative control: outputs of other weights part where the model is sure of itself."""
    exact, coarse = load("llama", "target", dtype="float32"), load("llama", "target", weights, dtype=dtype)
    inputs = families.prompts(4)
    assert _exceeds(exact, inputs, _new_tokens(coarse, inputs)[0], _new_tokens(exact, inputs)[0]) > 10


@torch.no_grad()
@pytest.mark.parametrize("weights", PRECISIONS, ids=str)
def test_bound_is_what_passes_of_other_widths_show(load: Any, weights: tuple[str | None, str]) -> None:
    """The bound holds for logits of one wide and of many narrow passes, and is not more than 100 times too wide."""
    model = load("llama", "target", weights[0], dtype=weights[1])
    ids = families.prompts(4, length=40)["input_ids"]
    wide = model(ids).logits.float()
    past, narrow = None, []
    for token in ids.split(1, dim=1):
        out = model(token, **{CACHE_NAME: past}, use_cache=True)
        past = cache_of(out)
        narrow.append(out.logits.float())
    # A margin is a difference of two logits: its error in either direction is at most twice that of one.
    error = 2 * float((wide - torch.cat(narrow, dim=1)).abs().max())
    assert resolution(model, wide) / 100 < error < resolution(model, wide)


def test_quantized_weights_are_quantized(load: Any) -> None:
    for (weights, dtype), family in itertools.product(PRECISIONS, ("llama", "bloom")):
        model = load(family, "target", weights, dtype=dtype)
        assert (quantized_layers(model) > 0) == (weights is not None)
        assert model.dtype == getattr(torch, dtype)


def test_int4_passes_are_kept_from_inference_mode(load: Any) -> None:
    """Which such weights can't do with; everything else is faster in it."""
    plain, int8, int4 = (load("llama", "target", weights) for weights in (None, "int8", "int4"))
    assert pass_mode(plain) is torch.inference_mode and pass_mode(plain, int4) is torch.no_grad
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference tensor"):
        int4(**families.prompts(1))
    assert pass_mode(int8) is torch.no_grad, "whose weights could, but are of quanto's class too"


def test_better_transformer_of_quantized_bloom(load: Any) -> None:
    model = load("bloom", "target", "int8", dtype="float32")
    inputs = families.prompts(1)
    plain, _ = _new_tokens(model, inputs)
    assert _exceeds(model, inputs, _new_tokens(to_better_transformer(model), inputs)[0], plain) <= 1


def test_int4_needs_no_compiler() -> None:
    load_kwargs("int4")
    packed = torch.tensor([[0x10, 0x32], [0xBA, 0xFE]], dtype=torch.uint8)
    unpacked = torch.ops.quanto.unpack(packed, 4)
    assert unpacked.tolist() == [[0, 2], [10, 14], [1, 3], [11, 15]]
    assert isinstance(get_extension("quanto_cpp")._lib, SimpleNamespace), "otherwise it was compiled"


# --- place ---------------------------------------------------------------------------------------------------

HALF = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"} | dict.fromkeys(
    ("model.layers.1", "model.norm", "lm_head"), "disk"
)


@pytest.mark.parametrize("family", ["llama", "bloom", "t5"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_models_placed_by_accelerate(load: Any, family: str, weights: str | None) -> None:
    target, draft = (load(family, role, weights, dtype="float32", device_map="auto") for role in ("target", "draft"))
    inputs = families.prompts(2)
    plain, _ = _new_tokens(load(family, "target", weights, dtype="float32"), inputs)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        ours, stats = _new_tokens(target, inputs)
    assert ours == plain and 0 < stats.acceptance_rate < 1


@pytest.mark.parametrize("roles", ["target", "draft", "both"])
def test_weights_on_disk(load: Any, tmp_path, roles: str) -> None:
    models = {role: load("llama", role) for role in ("target", "draft")}
    inputs = families.prompts(2)
    plain, _ = _new_tokens(models["target"], inputs)
    for role in models:
        if roles in (role, "both"):
            models[role].save_pretrained(tmp_path / role)
            models[role] = AutoModelForCausalLM.from_pretrained(
                tmp_path / role, device_map=HALF, offload_folder=tmp_path / f"{role} offloaded"
            )
            check_loaded(models[role])
            places = {parameter.device.type for parameter in models[role].parameters()}
            assert places == {"cpu", "meta"}, "a part is where it can't be computed with, until it is fetched"
    with hf_specdec.enable(models["target"], assistant_model=models["draft"], generation_strategy="speculative"):
        ours, stats = _new_tokens(models["target"], inputs)
    assert ours == plain and 0 < stats.acceptance_rate < 1


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_offloaded_as_a_whole_is_refused_by_name(role: str) -> None:
    argument = {"target": "model", "draft": "assistant_model"}[role]
    models = dict(zip(("target", "draft"), families.pair("llama"), strict=True))
    cpu_offload(models[role], execution_device=torch.device("cpu"))
    with pytest.raises(BenchError, match=r"--device_map: 'auto' .* LlamaForCausalLM.* choose a smaller model"):
        check_loaded(models[role], None, "auto")
    with pytest.raises(ValueError, match=f"{argument}=LlamaForCausalLM is on the 'meta' device.*device_map"):
        speculated(models["target"], models["draft"], **families.prompts(1), **GREEDY)


@pytest.mark.parametrize(("arguments", "named"), [
    ({"device_map": "nonsense"}, "--device_map: 'nonsense' must be one of auto"),
    ({"offload_folder": Path("o")}, "--offload_folder: 'o' needs --device_map auto"),
    (
        {"precision": "int8", "device_map": "auto", "offload_folder": Path("o")},
        "--offload_folder: 'o' with --precision int8: .*; leave out one of the two",
    ),
])  # fmt: skip
def test_bad_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(BenchError, match=named):
        load_kwargs(**arguments)


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(precision, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"--precision: 'int8' needs optimum-quanto; pip install 'hf_specdec\["):
        load_kwargs("int8")
    with pytest.raises(BenchError, match="--device_map: 'auto' needs accelerate"):
        load_kwargs(device_map="auto")


def test_a_model_that_quanto_leaves_as_it_is_is_refused(load: Any) -> None:
    with pytest.raises(BenchError, match="--precision: 'int8' changes nothing in GPT2LMHeadModel"):
        load("gpt2", "target", "int8", dtype="float32")


def test_plain_loading_asks_for_nothing() -> None:
    assert load_kwargs() == {"dtype": "auto"} and load_kwargs(dtype="bfloat16") == {"dtype": torch.bfloat16}
