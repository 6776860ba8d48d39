"""The task `tune`: what it tries, what it chooses when figures are certain, and what it writes."""

import json
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.models import prompts
from helpers.script import load_script
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.figures.quality import Difference
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Call, ColdStart, Result, Tuned
from hf_specdec.bench.running.measuring import new
from hf_specdec.bench.running.methods import plain
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.tasks import tune
from hf_specdec.bench.tuning import contest as races

SUMS = [{"q": f"How much is {n} and {n}?", "a": f"{2 * n} and no more"} for n in range(2, 10)]
Seconds = Callable[[str], float]


def halved(name: str) -> float:
    return 1.0 if name == "plain" else 0.5


@pytest.fixture(scope="module")
def settings(saved_pair: tuple[Path, Path], tmp_path_factory) -> Settings:
    folder = tmp_path_factory.mktemp("tune")
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
    return Settings(
        task="tune", model_name=str(saved_pair[0]), assistant_model=str(saved_pair[1]), assisted_generation=True,
        max_new_tokens=6, dataset=str(folder / "sums.jsonl"), prompt_column="q", reference_column="a",
        engines=("recorded", "static", "compiled"), output_dir=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pairs(settings: Settings) -> list[LoadedPair]:
    return tune._pairs(settings)


class Clock:
    """Runs while calls are made, and at no other time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def patch_calls(monkeypatch: pytest.MonkeyPatch, seconds: Seconds, kept: Seconds, assumed: float) -> None:
    """Calls take what a test says and answer with this share of the reference's words, without a model."""

    def call(method: Any, batch: Any, settings: Settings, **place: Any) -> Call:
        if seconds(method.name) < 0:
            raise ValueError("not\nwith this model")
        Clock.now += seconds(method.name)
        rows = len(batch)
        return Call(
            method=method.name, prompts=tuple(prompt.index for prompt in batch), repeat=place["repeat"], position=0,
            seconds=seconds(method.name), first_seconds=0.001, new_tokens=6 * rows, first_tokens=rows,
            outputs=("x",) * rows, tokens=((3,) * 6,) * rows,
        )  # fmt: skip

    def warm(method: Any, batch: Any, settings: Settings, most: int, number: int) -> ColdStart:
        Clock.now += 3.0
        return ColdStart(method.name, len(batch), 9, (2.0, 1.0), True, number)

    def score(part: Any, name: str, base: str) -> Difference:
        loss = -100 * (1 - kept(name))
        return Difference(loss, loss, 0.0, bound=loss, worse=1)

    monkeypatch.setattr(races, "warm_call", call)
    monkeypatch.setattr(races, "warm_up", warm)
    monkeypatch.setattr(races, "worst_difference", score)
    monkeypatch.setattr(races, "kept_engines", lambda *_, **__: [None])
    monkeypatch.setattr(races, "_ASSUMED_SECONDS", {"static": 1.0, "compiled": assumed})


@pytest.fixture
def contest(settings: Settings, pairs: list[LoadedPair], monkeypatch) -> Callable[..., tuple[Tuned, Result]]:
    """Races candidates whose calls take so long; returns what is chosen, and the whole result."""

    def race(
        seconds: Seconds, kept: Seconds = lambda name: 1.0, *, within: float = 300, assumed: float = 1.0, **more: Any
    ) -> tuple[Tuned, Result]:
        patch_calls(monkeypatch, seconds, kept, assumed)
        asked = replace(settings, **more)
        about = tune._prompts(asked, pairs[0], [dialogue[0] for dialogue in questions.dialogues(asked)])
        result = new(asked, [plain(pair) for pair in pairs])
        result.prompts = sorted((told for _, told in about), key=lambda told: told.index)
        one = races.Contest(result, pairs, tune._batches([prompt for prompt, _ in about], asked.batch_size), Clock())
        one.run(within)
        tune.conclude(result, [one])
        return result.tuned[0], result

    return race


def text_of(result: Result) -> str:
    """The report without its pictures."""
    return "\n\n".join(block for block in tune.render(result) if isinstance(block, str))


@pytest.mark.parametrize(("seconds", "words"), [
    (lambda name: 0.5 if "auto/entropy" in name else 1.0, ("speculative/", "auto/entropy")),
    (lambda name: {"none compiled": 0.5, "none static": 0.6}.get(name, 1.0), ("none compiled",)),
    # Its rank on the first engine brings it to the others.
    (lambda name: (0.6 if "tokens=6" in name else 1.0) - 0.1 * ("compile" in name), ("tokens=6", "compile=True")),
    (
        lambda name: 0.5 if "suffix" in name and "static" in name else 0.9 + 0.1 * ("suffix" not in name),
        ("suffix",),
    ),
])  # fmt: skip
def test_what_is_fastest_is_chosen(seconds: Seconds, words: tuple[str, ...], contest) -> None:
    chosen, result = contest(seconds)
    assert chosen.choice is not None and all(word in chosen.choice for word in words)
    text = text_of(result)
    assert "2.00 (2.00–2.00) times plain generate(), end to end" in text
    assert "As a command: `assisted_generation.py --task benchmark" in text and "As keywords: `model.generate(…" in text


def test_a_choice_at_the_end_of_what_was_tried_is_said(contest) -> None:
    for tokens, said in ((12, True), (6, False)):
        end = f"num_assistant_tokens={tokens}"
        _, result = contest(lambda name, end=end: 0.5 if name.endswith(end) else 1.0, engines=("recorded",))
        assert ("12 is the highest value tried" in text_of(result)) == said


def test_plain_decoding_is_chosen_where_nothing_is_faster(contest) -> None:
    chosen, result = contest(lambda name: 1.0 if name == "plain" else 1.1)
    assert chosen.choice is None and "Plain generate() is best" in text_of(result)
    assert not tune.servers(result)


def test_bild_is_chosen_only_at_a_loss_that_is_allowed(contest) -> None:
    about = (lambda name: {"bild": 0.4, "spec": 0.6}.get(name[:4], 1.0)), lambda name: 0.97
    for most, kind in ((None, "speculative"), (2.0, "speculative"), (4.0, "bild")):
        chosen, result = contest(*about, max_quality_loss=most, engines=("recorded",))
        assert chosen.choice.startswith(kind), most
        tried = {call.method for call in result.calls}
        assert any(name.startswith("bild") for name in tried) == (most is not None)
        assert ("that takes 183 questions" in text_of(result)) == (most == 2.0)
    assert "Difference in quality to plain decoding, in points: -3.0" in text_of(result)


def test_what_the_time_does_not_pay_for_is_left_out_and_said(contest) -> None:
    def seconds(name: str) -> float:
        return 0.5 if "compile" in name else 1.0

    chosen, result = contest(seconds, assumed=300.0)
    called = {call.method for call in result.calls}
    assert not any("compile" in name for name in called) and any("static" in name for name in called)
    (note,) = (note for note in chosen.notes if note.startswith("Left out"))
    assert "compiled" in note and "about 300 s" in note and "--minutes" in note and "static" not in note
    chosen, _ = contest(seconds)
    assert "compile" in chosen.choice and not any(note.startswith("Left out") for note in chosen.notes)


def test_a_time_too_short_for_a_choice_is_said(contest) -> None:
    for within, too_short in ((6.0, True), (60.0, False)):
        chosen, result = contest(halved, within=within, engines=("recorded",))
        examples = {call.prompts for call in result.calls if call.method == next(iter(chosen.ratios))}
        assert (len(examples) < ENOUGH) == too_short and (chosen.choice is None) == too_short
        text = text_of(result)
        assert ("The time was too short for a choice" in text and "--minutes" in text) == too_short
        assert ("Plain generate() is best" not in text) and ("2.00 times" in text) == too_short


def test_too_few_prompts_for_a_choice_are_said(contest) -> None:
    for limit, size, words in (
        (5, 1, "6 different prompts, and there are 5"),
        (8, 2, "6 different batches of 2 prompts, and there are 4"),
    ):
        chosen, result = contest(halved, engines=("recorded",), limit=limit, batch_sizes=(size,))
        assert chosen.choice is None
        assert len(result.calls) > 50 * ENOUGH, "repeats are no further prompts"
        assert f"There are too few prompts for a choice: it takes {words}" in text_of(result)
    chosen, _ = contest(halved, engines=("recorded",), limit=6)
    assert chosen.choice is not None, "the control"


def test_a_race_on_too_few_examples_does_not_count(contest) -> None:
    for slow, decides in ((70.0, 0), (0.25, 1)):
        chosen, result = contest(
            lambda name, slow=slow: slow if "static" in name else halved(name), engines=("recorded", "static")
        )
        text = text_of(result)
        assert any("static" in call.method for call in result.calls)
        assert ("static" in chosen.choice) == (decides == 1)
        assert ("were compared on fewer than 6 different examples" in text) == (decides == 0)
        assert chosen.ratios[chosen.choice].value == [2.0, 4.0][decides]
        assert tune.tried(whole(result), chosen)[0].name == chosen.choice


def test_what_a_model_refuses_is_said(contest) -> None:
    chosen, _ = contest(lambda name: -1.0 if "suffix" in name else 1.0, engines=("recorded",))
    refused = [note for note in chosen.notes if "refused" in note]
    assert len(refused) == 1 and all(note.endswith("refused. not with this model") for note in refused)


def test_other_engines_get_the_best_and_its_neighbours(settings: Settings, pairs: list[LoadedPair]) -> None:
    found = {one.method.name: one for one in races.candidates(settings, pairs)}
    ranking = [one for name, one in found.items() if "suffix" in name or "entropy" in name]
    ranking += [one for name, one in found.items() if name.endswith("num_assistant_tokens=6")]
    for engine, kept in (("static", True), ("compiled", False)):
        listed = races.on_engine(engine, ranking)
        assert {one.method.engine for one in listed} == {engine}
        plain_drafts = [one.method.lookahead for one in listed if len(one.method.keywords) == 3 and one.method.draft]
        assert plain_drafts == [6, 8, 4]
        assert [one.method.kind for one in listed[:2]] == ["speculative", "none"]
        assert sum("entropy_threshold" in one.method.keywords for one in listed) == 1
        assert any("suffix" in one.method.name for one in listed) == kept, "compiled rounds draft with a model"
    unpaying = races.on_engine("compiled", [found["none recorded"], *ranking])
    assert unpaying[0].method.kind == "none", "first where drafts don't pay"
    assert races.on_engine("static", []) == []


def test_every_engine_with_many_callers_has_its_command() -> None:
    found = dict(tune.server_commands("org/big", "org/a draft", 5, sampling=True))
    vllm, sglang, llama = (shlex.split(words) for words in found.values())
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": "org/a draft", "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "6", "the target's own token counts"
    assert llama[llama.index("--model-draft") + 1] == "a draft.gguf"
    assert all(any(letter.isdigit() for letter in version) for version in found), "each names its version"
    assert "probabilistic" not in str(tune.server_commands("org/big", "org/draft", 5, sampling=False))


def test_a_saved_configuration_makes_the_loaded_model_speculate(saved_pair: tuple[Path, Path], tmp_path) -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in saved_pair)
    keywords = {"generation_strategy": "speculative", "num_assistant_tokens": 3}
    shutil.copytree(saved_pair[0], tmp_path / "model")
    tune.save_configuration(target, keywords, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.generation_config.eos_token_id == target.generation_config.eos_token_id
    with hf_specdec.enable(loaded):
        loaded.generate(**prompts(1), assistant_model=draft, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    stats = hf_specdec.last_speculation(loaded)
    assert stats is not None and max(stats.rounds[0].drafted) == 3
    for name, value in keywords.items():
        setattr(target.generation_config, name, value)
    target.generation_config._from_model_config = True
    target.generation_config.save_pretrained(tmp_path)
    assert not hasattr(GenerationConfig.from_pretrained(tmp_path), "generation_strategy"), "what the copy is for"


@pytest.fixture(scope="module")
def folder(settings: Settings, tmp_path_factory) -> Path:
    """What the script leaves of a short run on two batch sizes."""
    folder = tmp_path_factory.mktemp("out")
    run = races.Contest.run
    line = f"--task tune --minutes 1 --engines recorded static --batch_size 1 2 --model_name {settings.model_name} "
    line += f"--assistant_model {settings.assistant_model} --max_new_tokens 6 --max_quality_loss 100 --prompt_column q "
    line += f"--dataset {settings.dataset} --output_dir {folder}"
    with pytest.MonkeyPatch.context() as patch:
        # Seconds of this process, so that a busy machine tries as much.
        patch.setattr(races.Contest, "run", lambda self, seconds: run(self, 2.0))
        patch.setattr(tune, "Contest", partial(races.Contest, clock=time.process_time))
        assert load_script().main(line.split()) == 0
    return folder


def test_a_run_leaves_its_files(folder: Path) -> None:
    (data,) = folder.glob(f"*{results.SUFFIX}")
    result = results.load(data)
    assert [tuned.batch for tuned in result.tuned] == [1, 2]
    assert {len(call.prompts) for call in result.calls} == {1, 2} and result.prompts[0].references == ()
    names = {method.name for method in result.methods}
    assert {call.method for call in result.calls} < names and any(name.startswith("bild") for name in names)
    text = data.with_name(data.name.replace(results.SUFFIX, ".md")).read_text()
    assert "## Batch size 2" in text and "within 1 minutes" in text
    chosen = [tuned for tuned in result.tuned if tuned.choice is not None]
    saved = [
        folder / f"{data.name.removesuffix(results.SUFFIX)}-batch-{t.batch}" / GENERATION_CONFIG_NAME for t in chosen
    ]
    assert sorted(folder.glob(f"*/{GENERATION_CONFIG_NAME}")) == sorted(saved)
