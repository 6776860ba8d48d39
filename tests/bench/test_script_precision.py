"""Precision and device placement through the script: each combination against plain decoding with the same weights."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers.integrations.accelerate as placement
from helpers.resolution import resolution
from helpers.tiny_pair import save_pair

from hf_specdec.bench.inputs.prompts import benchmark_prompts
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.records import Result
from hf_specdec.bench.results import SUFFIX, load
from hf_specdec.bench.running.divergence import next_logits
from hf_specdec.bench.settings import Settings

# Every value of every argument; which pairs of precisions decode alike is tested without the script.
COMBINATIONS = [
    ("llama", "--dtype float16 --draft_device cpu --draft_dtype float32"),
    ("llama", "--dtype float32 --precision int4 --draft_precision int8 --draft_dtype bfloat16"),
    ("llama", "--dtype bfloat16 --device_map sequential --precision int8"),
    ("llama", "--dtype float32 --device_map auto"),
    ("t5", "--dtype float32 --precision int8 --draft_precision int4"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, list[str]]:
    """The arguments that name a decoder-only pair and a T5 pair."""
    found = {}
    for kind in ("llama", "t5"):
        target, draft = save_pair(tmp_path_factory.mktemp(kind), encoder_decoder=kind == "t5")
        found[kind] = ["--model_name", str(target), "--assistant_model", str(draft)]
    return found


def measured(script: ModuleType, words: list[str], folder: Path) -> Result:
    """The result of a short benchmark with these arguments."""
    short = ["--prompt_lengths", "20", "--limit", "3", "--max_new_tokens", "12", "--repeats", "1", "--gamma", "3"]
    assert script.main([*words, *short, "--assisted_generation", "--output_dir", str(folder)]) == 0
    (found,) = folder.glob(f"*{SUFFIX}")
    return load(found)


def outputs(result: Result, method: str) -> list[str]:
    return [call.outputs[0] for call in result.calls if call.method == method]


@pytest.mark.parametrize(("kind", "line"), COMBINATIONS)
def test_outputs_are_plain_decoding_s_or_part_at_a_near_tie(script, models, tmp_path, kind: str, line: str) -> None:
    words = [*models[kind], *line.split()]
    result = measured(script, words, tmp_path)
    asked = dict(zip(line.split()[::2], line.split()[1::2], strict=True))
    described = result.models
    for role, prefix in (("target", "--"), ("draft", "--draft_")):
        dtype = asked.get(f"{prefix}dtype", asked["--dtype"])
        weights = asked.get(f"{prefix}precision")
        assert described[role].dtype == (dtype if weights is None else f"{weights} weights, {dtype}")
        assert described[role].device == "cpu"
    pairs = list(zip(outputs(result, "speculative"), outputs(result, "plain"), strict=True))
    assert len(pairs) == 3
    if any(ours != plain for ours, plain in pairs):
        check_margins(parsed(script, words), result)


def parsed(script: ModuleType, words: list[str]) -> Settings:
    settings: Settings = script.settings_of([*words, "--assisted_generation"])
    return settings


def check_margins(settings: Settings, result: Result) -> None:
    """Where outputs part, the target's best two logits are closer than its arithmetic resolves."""
    pair = load_pair(settings)
    prompts = benchmark_prompts(pair, (20,), 3, 12)
    for prompt, asked in zip(prompts, result.prompts, strict=True):
        found = asked.divergences.get("speculative")
        if found is not None:
            # Logits of one model resolve about as much at every place.
            inputs = {"input_ids": torch.tensor([prompt.token_ids])}
            assert max(found.margin, found.gap or 0.0) <= resolution(pair.target, next_logits(pair.target, inputs, []))


def test_weights_that_fit_nowhere_lie_on_disk(script, models, tmp_path, monkeypatch) -> None:
    plain = measured(script, [*models["llama"], "--dtype", "float32"], tmp_path / "in memory")
    # Room for the embeddings and a layer.
    monkeypatch.setattr(placement, "accelerate_max_memory", lambda most=None: {"cpu": 130_000})
    words = [*models["llama"], "--dtype", "float32", "--device_map", "auto"]
    words += ["--offload_folder", str(tmp_path / "offloaded")]
    spread = measured(script, words, tmp_path / "spread")
    target = load_pair(parsed(script, words)).target
    assert {parameter.device.type for parameter in target.parameters()} == {"cpu", "meta"}, "the rest is on disk"
    assert outputs(spread, "speculative") == outputs(spread, "plain") == outputs(plain, "plain")


def test_a_target_without_any_room_is_refused_in_one_line(script, models, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(placement, "accelerate_max_memory", lambda most=None: {"cpu": 1_000})
    words = [*models["llama"], "--assisted_generation", "--device_map", "auto"]
    words += ["--offload_folder", str(tmp_path / "offloaded"), "--output_dir", str(tmp_path / "out")]
    assert script.main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "--device_map: 'auto' offloads even the first layer" in err
