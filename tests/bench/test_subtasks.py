"""The task `subtasks`: methods and their order, turns, cut prompts, divergences, batches, and its report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.script import load_script
from helpers.tiny_pair import CONTEXT, save_pair

from hf_specdec import embedded
from hf_specdec.bench import results
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.inputs.likely_tokens import likely_tokens
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.records import Result
from hf_specdec.bench.results import document, load, stem
from hf_specdec.bench.running.measuring import batches
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import TASKS, run_task, sweep
from hf_specdec.bench.tasks.subtasks import render

NAMES = ["plain", "none recorded", "assisted", "assisted confidence 0.4", "prompt_lookup", "speculative", "bild"]


def settings_for(folder: Path, encoder_decoder: bool = False, **more: Any) -> Settings:
    target, draft = save_pair(folder, encoder_decoder)
    return Settings(
        task="subtasks", model_name=str(target), assistant_model=str(draft), assisted_generation=True,
        num_assistant_tokens=3, fallback_threshold=0.1, output_dir=folder / "out",
        **{"max_new_tokens": 9, "limit": 1, "repeats": 2} | more,
    )  # fmt: skip


def result_of(settings: Settings) -> Result:
    return load(settings.output_dir / f"{stem(settings)}.json.gz")


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return settings_for(tmp_path_factory.mktemp("subtasks"))


@pytest.fixture(scope="module")
def printed(settings: Settings) -> str:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("sys.stdout.write", lines.append)
        run_task(settings)
    return "".join(lines)


@pytest.fixture(scope="module")
def result(settings: Settings, printed: str) -> Result:
    return result_of(settings)


def texts_of(result: Result, name: str) -> dict[int, str]:
    """The answers of the first repeat."""
    calls = [call for call in result.calls if (call.method, call.repeat) == (name, 0)]
    return {index: text for call in calls for index, text in zip(call.prompts, call.texts or [], strict=True)}


def check_second_turns(settings: Settings, result: Result) -> None:
    """Each follows plain decoding's own answer to the first."""
    pair, plain = load_pair(settings), texts_of(result, "plain")
    seconds = [q for dialogue in questions.dialogues(settings) for q in dialogue if q.earlier]
    assert seconds
    for question in seconds:
        (earlier,) = question.earlier
        text = f"{question.turns[0]}\n{plain[earlier]}\n{question.turns[1]}"
        wanted = len(pair.tokenizer(text).input_ids)
        shown = next(prompt for prompt in result.prompts if prompt.index == question.index)
        assert (shown.turn, shown.question) == (2, earlier)
        assert (shown.tokens, shown.cut) == (min(wanted, CONTEXT - 9), max(0, wanted - (CONTEXT - 9)))


def test_second_turns_follow_plain_decoding_s_first_answers(settings: Settings, result: Result) -> None:
    check_second_turns(settings, result)


def test_batches_hold_dialogues_of_one_subtask_and_answer_as_single_questions_do(tmp_path, capsys) -> None:
    asked = tmp_path / "question.jsonl"
    lines = [
        {"category": category, "turns": [f"How much is {n} and {turn}?" for turn in range(turns)]}
        for category, turns in (("qa", 1), ("writing", 2))
        for n in range(3)
    ]
    asked.write_text("".join(json.dumps(one) + "\n" for one in lines))
    one = settings_for(tmp_path, dataset="spec_bench", dataset_path=asked, limit=3, repeats=1)
    three = Settings(**vars(one) | {"batch_sizes": (2,), "output_dir": tmp_path / "batched"})
    groups = batches(questions.dialogues(three), 2)
    sizes = [len(batch) for group in groups for batch in group]
    assert set(sizes) == {1, 2} and sum(sizes) == 3 + 2 * 3
    assert all(len({question.subtask for question in batch}) == 1 for group in groups for batch in group)
    run_task(one)
    run_task(three)
    alone, batched = result_of(one), result_of(three)
    assert [method.name for method in batched.methods] == ["plain", "none recorded", "speculative", "bild"]
    for name in ("plain", "none recorded", "speculative"):
        assert texts_of(batched, name) == texts_of(alone, name)
    assert any("they need batch size 1" in note for note in batched.notes)
    check_second_turns(three, batched)


def test_prompts_that_were_cut_are_said(result: Result, printed: str) -> None:
    cut = [prompt for prompt in result.prompts if prompt.cut]
    assert cut and all(prompt.tokens == CONTEXT - 9 for prompt in cut)
    assert f"{len(cut)} of {len(result.prompts)} prompts were longer than the context and cut on the left" in printed


def test_divergences_are_where_outputs_part(result: Result) -> None:
    # In float64 the lossless methods leave plain decoding nowhere; BiLD does, where its rollback lets it.
    assert {name for prompt in result.prompts for name in prompt.divergences} <= {"bild"}
    plain, bild = (
        {call.prompts: call.outputs for call in result.calls if (call.method, call.repeat) == (name, 0)}
        for name in ("plain", "bild")
    )
    for prompt in result.prompts:
        found = prompt.divergences.get("bild")
        assert (found is None) == (bild[(prompt.index,)] == plain[(prompt.index,)])
        assert found is None or (0 <= found.position < 9 and found.margin is not None)


def test_bare_passes_are_timed_at_each_subtask_in_each_repeat(result: Result) -> None:
    places = {(item.engine, item.prompts, item.repeat) for item in result.passes}
    prompts = {place[1] for place in places}
    labels = {prompt.index: prompt.label for prompt in result.prompts}
    assert sorted(labels[index] for (index,) in prompts) == sorted(embedded.SUBTASKS)
    assert places == {(e, p, r) for e in ("generate", "recorded") for p in prompts for r in range(2)}


def test_outputs_of_one_token_have_no_rate(tmp_path, capsys) -> None:
    settings = settings_for(tmp_path, dataset="embedded:qa", max_new_tokens=1, repeats=1)
    run_task(settings)
    text = (settings.output_dir / f"{stem(settings)}.md").read_text()
    assert document(result_of(settings), stem(settings), render)[0] == text


def test_encoder_decoder_pairs_in_sampling(tmp_path) -> None:
    settings = settings_for(tmp_path, encoder_decoder=True, dataset="embedded:qa", do_sample=True, limit=2, repeats=1)
    run_task(settings)
    result = result_of(settings)
    assert [method.name for method in result.methods] == NAMES
    assert len(result.calls) == 2 * len(NAMES) and all(call.new_tokens for call in result.calls)


def test_quality_in_sampling_is_that_of_the_same_draws_in_every_repeat(tmp_path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"q": "How much is 2 and 3?", "a": "5"}\n{"q": "How much is 2 and 4?", "a": "6"}\n')
    data = {"dataset": str(questions), "prompt_column": "q", "reference_column": "a", "limit": None, "repeats": 2}
    settings = settings_for(tmp_path, do_sample=True, **data)
    run_task(settings)
    result = result_of(settings)
    drawn = [
        {(call.method, call.prompts): call.outputs for call in result.calls if call.repeat == repeat}
        for repeat in (0, 1)
    ]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 2 * len(NAMES)
    assert len(set(drawn[0].values())) > 4, "methods and questions draw their own"
    assert "- sampling (temperature 1, top_k 50, top_p 1, seed 0)" in document(result, "x", render)[0]


def test_the_split_of_the_embedded_data_is_chosen_and_said(tmp_path) -> None:
    train, heldout = (
        {q.turns for dialogue in questions.dialogues(Settings(task="sweep", split=split, limit=3)) for q in dialogue}
        for split in ("train", None)
    )
    assert not train & heldout
    with pytest.raises(BenchError, match="--split: 'test' must be a split of the embedded data: train, heldout"):
        questions.dialogues(Settings(task="sweep", split="test"))


def test_quality_is_judged_on_fifty_examples_by_default() -> None:
    def dialogues(**asked: Any) -> int:
        return len(questions.dialogues(sweep.asked(replace(TASKS["sweep"].defaults, **asked))))

    subtasks = len(embedded.SUBTASKS)
    assert len(questions.dialogues(Settings(task="subtasks"))) == 50 * subtasks
    assert dialogues(generation_strategy="bild") == 50 * subtasks
    assert dialogues(grid={"rollback_threshold": (1.0, 2.0)}) == 50 * subtasks
    assert dialogues() == 5 * subtasks and dialogues(limit=2) == 2 * subtasks


LIMIT = 1  # examples of each subtask
SUBTASK = "qa"  # of the sweep
SHORT = ["--max_new_tokens", "5", "--repeats", "1", "--dtype", "float32"]
LINES = {
    "subtasks-target-draft-embedded-greedy": f"--task subtasks --limit {LIMIT}",
    f"sweep-target-draft-embedded_{SUBTASK}-train-greedy": (
        f"--task sweep --dataset embedded:{SUBTASK} --limit {LIMIT} --draft_models draft --split train --gamma 3 "
        "--fallback_thres 0.6 --rollback_thres 2"
    ),
}
SPLITS = {"subtasks": ("heldout", embedded.SUBTASKS), "sweep": ("train", (SUBTASK,))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder, script = tmp_path_factory.mktemp("embedded"), load_script()
    for line in LINES.values():
        assert script.main([*line.split(), *SHORT, "--output_dir", str(folder)]) == 0, line
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Result]:
    """The results by task."""
    return {name.split("-")[0]: results.load(folder / f"{name}{results.SUFFIX}") for name in LINES}


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, str]:
    """The rendered results by task."""
    return {name.split("-")[0]: (folder / f"{name}.md").read_text() for name in LINES}


def test_tables_have_a_row_for_each_subtask_and_setting(tables: dict[str, str]) -> None:
    for subtask in embedded.SUBTASKS:
        assert f"\n| {subtask} " in tables["subtasks"], subtask
    assert "\n| BiLD (fallback 0.6, rollback 2) " in tables["sweep"]


def test_the_list_of_a_trimmed_head_covers_what_it_has_not_seen() -> None:
    """Of the tokens of held-out answers."""
    pair = load_pair(Settings(assisted_generation=True, device="cpu"))
    listed = set(likely_tokens(pair, 1024, [], 0, 0))
    answers = [text for s in embedded.SUBTASKS for e in embedded.examples(s, "heldout", 10) for text in e.references]
    said = [token for text in answers for token in pair.tokenizer(text, add_special_tokens=False).input_ids]
    assert sum(token in listed for token in said) > 0.98 * len(said) and pair.tokenizer.eos_token_id in listed
    with pytest.raises(BenchError, match="--draft_vocabulary: 1 is not possible"):
        likely_tokens(pair, 1, [], 0, 0)


def test_every_method_answers_every_prompt(found: dict[str, Result]) -> None:
    for task, result in found.items():
        answered = [(call.method, index) for call in result.calls for index in call.prompts]
        methods, prompts = [one.name for one in result.methods], [one.index for one in result.prompts]
        assert sorted(answered) == sorted((method, prompt) for method in methods for prompt in prompts), task


def test_lossless_outputs_are_plain_decoding_s(found: dict[str, Result]) -> None:
    """Except at near-ties: their margins are far below those of the choices that BiLD leaves to the draft."""
    for task in SPLITS:
        for prompt in found[task].prompts:
            for method, divergence in prompt.divergences.items():
                assert method.startswith("bild") or (divergence.margin or 0) < 1e-3, (task, prompt.index, method)


def test_prompts_are_examples_of_the_split_asked_for(found: dict[str, Result]) -> None:
    """No example is in both, as the corpus's own tests show."""
    for task, (split, subtasks) in SPLITS.items():
        examples = [x for subtask in subtasks for x in embedded.examples(subtask, split, LIMIT)]
        expected = [(x.subtask, turn, (text,)) for x in examples for turn, text in enumerate(x.references, start=1)]
        prompts = [(prompt.label, prompt.turn, prompt.references) for prompt in found[task].prompts]
        assert prompts == expected, task
