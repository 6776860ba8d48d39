"""Models as users bring them: their names, their prompts, their chat templates and their generation_config."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.models import llama, noisy
from helpers.tiny_pair import VOCABULARY, tokenizer
from tokenizers import decoders

from hf_specdec import embedded
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.inputs import prose
from hf_specdec.bench.inputs.likely_tokens import likely_tokens
from hf_specdec.bench.inputs.prompts import asked_prompts, benchmark_prompts, decode_prompts, practice_prompts
from hf_specdec.bench.models import names
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.records import Result
from hf_specdec.bench.reports.heading import heading
from hf_specdec.bench.results import load
from hf_specdec.bench.running.measuring import batches_of, new
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' yes' if enable_thinking | default(true) else ' no' }}{% endif %}"
)
SHORT = ["--max_new_tokens", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def solo(tmp_path_factory) -> Path:
    """A chat model of which no draft is known, with settings of its own; to be changed by no test."""
    path = tmp_path_factory.mktemp("models") / "solo"
    model, words = llama(vocab_size=VOCABULARY, max_position_embeddings=512), tokenizer()
    model.generation_config.update(do_sample=True, top_k=7, temperature=0.5, repetition_penalty=1.3)
    model.generation_config.suppress_tokens = [5, 6]
    words.chat_template = TEMPLATE
    words.backend_tokenizer.decoder = decoders.ByteLevel()
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def pair(solo: Path) -> LoadedPair:
    return load_pair(Settings(model_name=str(solo)))


@pytest.fixture
def result(script: ModuleType, solo: Path, tmp_path) -> Iterator[object]:
    def run(*words: str) -> Result:
        assert script.main(["--model_name", str(solo), *SHORT, *words, "--output_dir", str(tmp_path)]) == 0
        return load(next(tmp_path.glob("*.json.gz")))

    yield run


@pytest.mark.parametrize("drafter", ["suffix", "none"])
@pytest.mark.parametrize("line", [
    "--task benchmark --assisted_generation --prompt_lengths 60 --limit 2",
    "--task decode --assisted_generation --prompt hello",
    "--task subtasks --dataset embedded:qa --limit 1",
    "--task sweep --dataset embedded:qa --limit 1 --gamma 2",
    "--task ablation --dataset embedded:qa --limit 1",
    "--task engines --engines eager --batch_size 1 2 --limit 2 --prompt_lengths 60 --gamma 2",
])  # fmt: skip
def test_without_a_draft_model_none_is_wanted(result, line: str, drafter: str) -> None:
    found = result(*line.split(), "--drafter", drafter)
    assert list(found.models) == ["target"] and {method.draft for method in found.methods} == {None}
    assert any(method.keywords.get("drafter") == drafter for method in found.methods)


def test_with_one_it_still_is(script: ModuleType, solo: Path, capsys) -> None:
    for drafter in ("model", "hybrid"):
        line = ["--model_name", str(solo), "--assisted_generation", "--drafter", drafter]
        assert script.main(line) == 1
        assert "no draft is known for the target" in capsys.readouterr().err


def test_a_folder_with_an_embedded_models_name_wins(solo: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names.full_name("target") == "target"
    (tmp_path / "target").symlink_to(solo)
    assert names.full_name("target") == "./target" not in embedded.names()
    pair = load_pair(Settings(model_name="target"))
    assert pair.tokenizer.chat_template == TEMPLATE and pair.target_name == "./target"
    assert names.default_draft("target") is None  # the embedded draft is for the embedded target


@pytest.mark.parametrize("task", ["benchmark", "engines"])
def test_prompts_of_ones_own_keep_their_length(result, task: str) -> None:
    more = ["--engines", "eager", "--drafter", "none", "--batch_size", "1", "3"] if task == "engines" else []
    found = result("--task", task, *more, "--prompt", "hello", "--prompt", "tell me a story")
    lengths = [len(tokenizer()(f"{text} yes").input_ids) for text in ("hello", "tell me a story")]
    assert [asked.tokens for asked in found.prompts] == lengths
    # A batch larger than there are prompts has them again.
    assert {call.prompts for call in found.calls} == {(0,), (1,), (0, 1, 0)} - (set() if more else {(0, 1, 0)})


def test_questions_of_a_data_set_come_by_kind(pair: LoadedPair) -> None:
    settings = Settings(dataset="embedded:qa", max_new_tokens=4)
    prompts, notes = asked_prompts(settings, pair, 3)
    assert [prompt.label for prompt in prompts] == ["qa"] * 3 and notes == []
    texts = [example.turns[0] for example in embedded.examples("qa", split="heldout", n=3)]
    decoded = [pair.tokenizer.decode(prompt.token_ids) for prompt in prompts]
    assert decoded == [f"{text} yes" for text in texts]
    (group,) = batches_of(prompts, replace(settings, batch_sizes=(2,)), 3)
    assert [[prompt.index for prompt in batch] for batch in group] == [[prompts[0].index, prompts[1].index]]
    _, notes = asked_prompts(replace(settings, max_new_tokens=500), pair, 3)
    assert notes == ["3 of 3 prompts were longer than the context and cut on the left."]


def test_a_model_of_ones_own_reads_prose(pair: LoadedPair) -> None:
    prompts = benchmark_prompts(pair, (70, 90), 2, new_tokens=4)
    texts = [pair.tokenizer.decode(prompt.token_ids) for prompt in prompts]
    assert all(text[:20] in prose.passage(0, 1) and text.endswith(" yes") for text in texts)
    assert texts[0][:20] == texts[2][:20] != texts[1][:20] == texts[3][:20]


def test_passages_are_spread_over_a_chapter() -> None:
    first, second = (prose.passage(number, 2) for number in (0, 1))
    assert first != second and sorted(first.split("\n\n")) == sorted(second.split("\n\n"))
    assert "Curiouser" in prose.passage(0, 1, chapter=1) and "Curiouser" not in first


def test_a_trimmed_head_knows_what_the_target_answers(pair: LoadedPair, monkeypatch) -> None:
    for name in ("_PROMPT", "_ANSWER"):
        monkeypatch.setattr(f"hf_specdec.bench.inputs.likely_tokens.{name}", 48)
    both = replace(pair, draft=noisy(pair.target), draft_name="x", draft_tokenizer=pair.tokenizer)
    tokens = likely_tokens(both, 60, [], following=30, seed=0)
    answers: set[int] = set()
    for prompt in practice_prompts(pair, 48):
        ids = torch.tensor([prompt.token_ids])
        output = pair.target.generate(ids, max_new_tokens=48, do_sample=False, pad_token_id=0)[0]
        answers |= {*output[len(prompt.token_ids) :].tolist()}
    corpus = " ".join(text for ex in embedded.examples("qa", split="train", n=20) for text in ex.turns)
    unseen = {*pair.tokenizer(corpus).input_ids} - answers
    assert len(set(tokens) & answers) > len(set(tokens)) / 2 > len(set(tokens) & unseen)


def test_templates_take_arguments(solo: Path, saved_pair: tuple[Path, Path], script: ModuleType) -> None:
    options = script.settings_of(["--model_name", str(solo), "--chat_template_kwargs", '{"enable_thinking": false}'])
    quiet = load_pair(Settings(**vars(options)))
    (prompt,), _ = decode_prompts(quiet, ["think"], 4)
    assert quiet.tokenizer.decode(prompt.token_ids) == "think no"
    (framed,) = benchmark_prompts(quiet, (60,), 1, new_tokens=4)
    assert quiet.tokenizer.decode(framed.token_ids).endswith(" no")
    with pytest.raises(BenchError, match=r"--chat_template_kwargs: .* has no chat template"):
        load_pair(Settings(model_name=str(saved_pair[0]), chat_template_kwargs={"a": 1}))


def test_sampling_has_the_models_own_settings(pair: LoadedPair, monkeypatch) -> None:
    prompts = benchmark_prompts(pair, (60,), 1, new_tokens=8)
    drawn = Settings(do_sample=True, max_new_tokens=8)
    greedy = timed_call(plain(pair), prompts, replace(drawn, do_sample=False)).tokens
    monkeypatch.setattr(pair.target.generation_config, "top_k", 1)
    assert timed_call(plain(pair), prompts, drawn).tokens == greedy
    assert timed_call(plain(pair), prompts, replace(drawn, top_k=0, temperature=9.0)).tokens != greedy


@pytest.mark.parametrize(("settings", "words"), [
    ({}, "greedy after the target's own processors (repetition_penalty 1.3, suppress_tokens of 2),"),
    ({"do_sample": True}, "sampling (temperature 0.5, top_k 7, top_p 1, seed 0) after the target's own processors"),
    ({"do_sample": True, "top_k": 0}, "sampling (temperature 0.5, top_k 0, top_p 1, seed 0)"),
])  # fmt: skip
def test_reports_name_what_the_configuration_brings(pair: LoadedPair, settings: dict, words: str) -> None:
    found = new(Settings(**settings), [plain(pair)])
    assert words in heading(whole(found))
    bare = {role: replace(model, sampling={}, processors={}) for role, model in found.models.items()}
    assert "processors" not in heading(whole(replace(found, models=bare)))
