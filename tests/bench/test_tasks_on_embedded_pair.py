"""Tasks of the script on the embedded pair, as a user starts them, short: its tables exist and hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.script import load_script

from hf_specdec import embedded
from hf_specdec.bench import results
from hf_specdec.bench.inputs.likely_tokens import likely_tokens
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.records import Result
from hf_specdec.bench.settings import BenchError, Settings

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
