"""Synthetic pairs: acceptance follows ε, drafts are first layers, and every title says what the pair is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hf_specdec
from hf_specdec.bench.models import synthetic
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import report
from hf_specdec.bench.tasks.benchmark import run_benchmark

CPU = torch.device("cpu")
TINY = ["tiny-llama", "tiny-qwen2", "tiny-opt"]


def build(name: str) -> tuple:
    return synthetic.build(synthetic.parse(f"synthetic:{name}"), CPU, torch.float64, CPU, torch.float64)


def speculate(target, draft, new_tokens: int = 60) -> hf_specdec.SpeculationStats:
    """Greedy speculation from a random prompt; its tokens have to be plain decoding's."""
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(2, target.config.vocab_size, (1, 30)), "attention_mask": torch.ones(1, 30)}
    expected = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    decoding = hf_specdec.SpeculativeDecoding(draft)
    out = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, custom_generate=decoding)
    assert torch.equal(out, expected)
    assert out.shape[1] == 30 + new_tokens, "nothing may end a text before its time"
    assert decoding.stats is not None
    return decoding.stats


@pytest.mark.parametrize("shape", TINY)
def test_acceptance_falls_from_one_as_epsilon_grows(shape: str) -> None:
    alphas = []
    for epsilon in (0, 0.1, 1):
        target, draft, sentence = build(f"{shape}:epsilon={epsilon}")
        assert f"ε = {epsilon}" in sentence and shape in sentence
        alphas.append(speculate(target, draft).alpha)
    assert alphas[0] == 1, "at ε = 0 the later layers add nothing"
    assert alphas[0] > alphas[1] > alphas[2]


def test_the_draft_is_the_first_layers_in_memory_of_its_own() -> None:
    target, draft, _ = build("tiny-llama:layers=3:epsilon=0.1")
    assert len(draft.model.layers) == 3 and len(target.model.layers) == 6
    theirs = dict(target.named_parameters())
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, theirs[name])
        assert parameter.data_ptr() != theirs[name].data_ptr()


def test_epsilon_is_found_for_an_acceptance() -> None:
    torch.manual_seed(5)
    ids = torch.randint(0, 2048, (1, 2000))
    for wanted in (0.6, 0.9):
        target, draft, sentence = build(f"tiny-llama:alpha={wanted}")
        agreement = (target(ids).logits.argmax(-1) == draft(ids).logits.argmax(-1)).double().mean().item()
        assert agreement == pytest.approx(wanted, abs=0.06)
        assert f"found for α = {wanted}" in sentence


@pytest.mark.parametrize("shape", synthetic.SHAPES)
def test_parameters_of_the_real_shapes(shape: str) -> None:
    published = {"llama-2-7b": 6_738_415_616, "qwen2-7b": 7_615_616_512, "opt-6.7b": 6_658_473_984}
    with torch.device("meta"):
        model = synthetic.AutoModelForCausalLM.from_config(synthetic.AutoConfig.for_model(**synthetic.SHAPES[shape]))
    assert model.num_parameters() == published.get(shape, model.num_parameters())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("synthetic:gpt-5", "'synthetic:gpt-5' has no known shape; choose one of llama-2-7b"),
        ("synthetic:tiny-opt:layers=6", "'layers=6' .* layers=1 to 5"),
        ("synthetic:tiny-opt:epsilon=2", "'epsilon=2' .* epsilon=0 to 1"),
        ("synthetic:tiny-opt:alpha=high", "'alpha=high' .* alpha=0 to 1"),
        ("synthetic:tiny-opt:depth=3", "'depth=3' .* options are"),
    ],
)
def test_what_a_name_can_not_ask_for(name: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        load_pair(Settings(model_name=name))


@pytest.mark.parametrize("argument", [{"assistant_model": "draft"}, {"precision": "int8"}, {"device_map": "auto"}])
def test_what_needs_stored_weights_is_refused(argument: dict[str, str]) -> None:
    with pytest.raises(BenchError, match=f"--{next(iter(argument))}: .* synthetic"):
        load_pair(Settings(model_name="synthetic:tiny-llama", **argument))


def test_dtypes_are_those_asked_for() -> None:
    name = "synthetic:tiny-llama:epsilon=0.1"
    pair = load_pair(Settings(model_name=name, assisted_generation=True, draft_dtype="bfloat16"))
    assert [model.dtype for model in pair.models] == [torch.float32, torch.bfloat16]
    assert load_pair(Settings(model_name=name)).draft is None


def test_every_title_says_synthetic(tmp_path: Path) -> None:
    settings = Settings(
        model_name="synthetic:tiny-llama:epsilon=0.05", assisted_generation=True, prompt_lengths=(40,),
        max_new_tokens=8, output_dir=tmp_path,
    )  # fmt: skip
    run_benchmark(settings)
    (path,) = tmp_path.glob("*.json")
    text = path.with_suffix(".md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert len(titles) > 4 and all(title.endswith("(synthetic pair)") for title in titles)
    assert "random weights in the shape of tiny-llama" in text and "ε = 0.05" in text
    for figure in report.pictures(json.loads(path.read_text())).values():
        assert figure.axes[0].get_title().startswith("Synthetic pair")
