"""The task `align`: the target's answers on disk, the training, and what becomes of the draft."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers import models
from helpers.tiny_pair import save_pair
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.bench.aligning import answers
from hf_specdec.bench.aligning.answers import answers_folder, target_answers
from hf_specdec.bench.aligning.batches import IGNORED, Collator, answer_logits
from hf_specdec.bench.aligning.losses import on_tokens
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.records import Result
from hf_specdec.bench.results import load
from hf_specdec.bench.running.measuring import batches
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import draft as task
from hf_specdec.bench.tasks import run_task

ALONE = Processes()
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def questions_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(f'{{"q": "How much is {n} and {"1" * n}?"}}\n' for n in range(1, 21)))
    return path


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Folders of a target and a draft that is often wrong, decoder-only and encoder-decoder."""
    found = {}
    for kind in ("decoder", "encoder-decoder"):
        target, draft = save_pair(tmp_path_factory.mktemp(kind), encoder_decoder=kind != "decoder")
        found[kind] = target, draft
    llama = AutoModelForCausalLM.from_pretrained(found["decoder"][0], dtype=torch.float64)
    models.noisy(llama, 0.4).save_pretrained(found["decoder"][1])
    return found


@pytest.fixture
def asked(kinds, questions_file: Path, tmp_path) -> Callable[..., Settings]:
    """Settings of the task for a pair of a kind."""

    def settings(kind: str = "decoder", **more: Any) -> Settings:
        given = {"steps": 4, "batch_sizes": (4,), "max_new_tokens": 8, "learning_rate": 1e-3, "output_dir": tmp_path}
        return Settings(
            task="align", model_name=str(kinds[kind][0]), assistant_model=str(kinds[kind][1]), assisted_generation=True,
            dataset=str(questions_file), prompt_column="q", **given | more,
        )  # fmt: skip

    return settings


def answered(settings: Settings, pair: LoadedPair, name: str = "learned") -> Any:
    groups = batches(task.prompts(settings)[0], settings.batch_size)
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    return target_answers(answers_folder(settings, pair) / name, settings, pair, groups, ALONE)


def result_in(folder: Path) -> Result:
    return load(next(folder.glob("*.json.gz")))


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_answers_are_those_of_plain_generate(kind: str, asked) -> None:
    """In float64; and at each of their places the collated batch has the logits that predict them."""
    settings = asked(kind)
    pair = load_pair(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.draft, "forward", None)  # the target answers alone
        found = answered(settings, pair)
    assert len(found) == 18, "one prompt in ten is held out"
    for row in list(found)[:6]:
        ids = torch.tensor([row["prompt"]])
        out = pair.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert row["answer"] == out[0, 1 if pair.encoder_decoder else ids.shape[1] :].tolist()
        assert row["text"] == pair.tokenizer.decode(row["answer"], skip_special_tokens=True).strip()
    rows = list(found)[:5]
    assert len({len(row["prompt"]) for row in rows}) > 1, "rows are padded"
    batch, read = Collator(pair)(rows), []
    hook = pair.target.get_output_embeddings().register_forward_hook(lambda _, states, out: read.append(states[0]))
    with torch.no_grad():
        chosen = answer_logits(pair.target, batch)
        others = answer_logits(pair.draft, batch).argmax(-1).tolist()
        hook.remove()
        inputs = {name: batch[name] for name in batch if name != "labels"}
        torch.testing.assert_close(chosen, pair.target(**inputs).logits[batch["labels"] != IGNORED])
    expected = [token for row in rows for token in row["answer"]]
    assert chosen.argmax(-1).tolist() == expected and others != expected
    assert [len(states) for states in read] == [len(expected)], "the head reads no prompt"
    prompts = Collator(pair).prompts(batch)
    kept = [ids[mask.bool()].tolist() for ids, mask in zip(*prompts.values(), strict=True)]
    assert kept == [row["prompt"] for row in rows]


def test_answers_go_on_after_an_interruption_and_are_used_again(asked, tmp_path, monkeypatch) -> None:
    settings = asked(output_dir=tmp_path / "cut", top_k_targets=3)
    pair, inner, asked = load_pair(settings), answers.timed_call, []

    def counted(*arguments: Any) -> Any:
        asked.append([prompt.index for prompt in arguments[1]])
        if len(asked) == 3:
            raise KeyboardInterrupt
        return inner(*arguments)

    monkeypatch.setattr(answers, "_PART", 1)
    monkeypatch.setattr(answers, "timed_call", counted)
    with pytest.raises(KeyboardInterrupt):
        answered(settings, pair)
    found = list(answered(settings, pair))
    assert asked[2] == asked[3], "it goes on where it stopped"
    assert sorted(index for batch in [*asked[:2], *asked[3:]] for index in batch) == [row["index"] for row in found]
    calls = len(asked)
    assert list(answered(replace(settings, loss="reverse_kl", steps=9), pair)) == found and len(asked) == calls
    assert list(answered(replace(settings, output_dir=tmp_path / "whole"), pair)) == found and len(asked) > calls
    assert not list(tmp_path.rglob("*.partial"))
    # Other answers lie elsewhere.
    places = {answers_folder(replace(settings, **{name: 7}), pair) for name in ("max_new_tokens", "seed", "limit")}
    assert len(places) == 3 and answers_folder(settings, pair) not in places


def test_stored_distributions_are_the_targets(asked) -> None:
    settings = asked(top_k_targets=3)
    pair = load_pair(settings)
    rows = list(answered(settings, pair))[:4]
    batch = Collator(pair)(rows)
    with torch.no_grad():
        logits = answer_logits(pair.target, batch)
    torch.testing.assert_close(batch["target_log_probs"], on_tokens(logits, batch["target_tokens"]).float())
    assert bool((batch["target_tokens"][:, 0] == logits.argmax(-1)).all())
    # Summed over tokens and rest.
    torch.testing.assert_close(batch["target_log_probs"].exp().sum(-1), torch.ones(len(logits)))


def test_a_better_draft_is_saved_beside_the_old_one(asked, kinds, tmp_path, capsys) -> None:
    """Its original stays byte for byte; a second run refuses to overwrite it."""
    before = weights_of(kinds["decoder"][1])
    settings = asked(steps=40, learning_rate=3e-3)
    run_task(settings)
    result, saved = result_in(tmp_path), tmp_path / "draft-aligned"
    facts = result.training
    assert facts is not None and facts.saved == str(saved) and weights_of(kinds["decoder"][1]) == before
    assert facts.held_out_curve[-1][1] < facts.held_out_curve[0][1] and facts.curve[-1][0] == 40
    assert facts.prompts == 18 and len(result.prompts) == 2
    assert "The draft is in" in capsys.readouterr().out
    assert list(tmp_path.glob("align-*-acceptance-by-position.png"))
    kept = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert kept == {"align", "answers", "draft"}, "no checkpoint, no journal"
    # An ordinary checkpoint: the keys of the original, other values.
    old, new = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (kinds["decoder"][1], saved))
    assert old.keys() == new.keys() and any(not torch.equal(old[key], new[key]) for key in old)
    assert {weight.dtype for weight in new.values()} == {weight.dtype for weight in old.values()}
    assert AutoTokenizer.from_pretrained(saved).get_vocab() == AutoTokenizer.from_pretrained(saved).get_vocab()
    with pytest.raises(BenchError, match=r"--output_dir: .*draft-aligned' is there already"):
        run_task(settings)


def test_a_draft_that_got_worse_is_said_to_be_so_and_not_saved(asked, kinds, tmp_path, capsys) -> None:
    before = weights_of(kinds["decoder"][1])
    settings = asked(learning_rate=10.0, loss="cross_entropy")
    run_task(settings)
    assert result_in(tmp_path).training.saved is None
    assert "**The draft did not get better**" in capsys.readouterr().out
    assert weights_of(kinds["decoder"][1]) == before and not (tmp_path / "draft-aligned").exists()


@pytest.mark.parametrize("more", [
    {"kind": "encoder-decoder", "on_policy": 1.0, "loss": "total_variation"},
    {"kind": "decoder", "on_policy": 0.5, "loss": "reverse_kl", "lora_rank": 2},
    {"kind": "encoder-decoder", "top_k_targets": 4},
], ids=lambda more: " ".join(map(str, more.values())))  # fmt: skip
def test_every_way_of_training_changes_the_draft(more: dict[str, Any], asked, tmp_path) -> None:
    from hf_specdec.bench.aligning.training import train

    settings = asked(**more)
    pair = load_pair(settings)
    rows = answered(settings, pair)
    copy = load_pair(settings).draft
    assert copy is not None and pair.draft is not None
    parameters = copy.num_parameters()
    facts = train(settings, pair, copy, rows, rows.select(range(4)), tmp_path / "training", ALONE)
    again = train(settings, pair, copy, rows, rows.select(range(4)), tmp_path / "training", ALONE)
    assert facts == again, "a finished training is not repeated"
    new = type(pair.draft).from_pretrained(tmp_path / "training" / "draft").state_dict()
    old = pair.draft.state_dict()
    assert old.keys() == new.keys() and any(not torch.equal(old[key], new[key]) for key in old)
    assert (facts.parameters < parameters) == ("lora_rank" in more)
    assert all(value >= 0 for _, value in facts.held_out_curve)


def test_training_goes_on_from_its_checkpoint(asked, tmp_path, monkeypatch) -> None:
    """Cut after a checkpoint and continued, it ends with the weights of a training that ran through."""
    from hf_specdec.bench.aligning import training

    settings = asked(steps=8)
    pair = load_pair(settings)
    rows, ends = answered(settings, pair), {}
    inner, steps = training.AlignmentTrainer.training_step, []

    def cut(self: Any, *arguments: Any, **keywords: Any) -> Any:
        steps.append(self.state.global_step)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return inner(self, *arguments, **keywords)

    for name in ("through", "cut"):
        if name == "cut":
            monkeypatch.setattr(training.AlignmentTrainer, "training_step", cut)
            with pytest.raises(KeyboardInterrupt):
                training.train(settings, pair, load_pair(settings).draft, rows, rows, tmp_path / name, ALONE)
        facts = training.train(settings, pair, load_pair(settings).draft, rows, rows, tmp_path / name, ALONE)
        assert facts.resumed_at == (4 if name == "cut" else 0), "what its seconds are about"
        ends[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name / "draft").state_dict()
    assert steps == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7], "from the last checkpoint"
    for key, weight in ends["through"].items():
        torch.testing.assert_close(ends["cut"][key], weight)


def test_steps_and_learning_rate_follow_data_and_draft(asked, tmp_path, monkeypatch) -> None:
    """Where none are given; the report names what was chosen."""
    from hf_specdec.bench.aligning import training

    assert training.default_steps(8000, 16) == 2500 and training.default_steps(10, 8) == 300
    rates = [training.default_learning_rate(count) for count in (10**5, 10**7, 10**8, 10**9)]
    assert rates[0] == 4e-3 and rates[0] > rates[1] > rates[2] == rates[3] == 1e-4
    monkeypatch.setattr(training, "_LEAST_STEPS", 3)
    settings = asked(steps=None, learning_rate=None)
    run_task(settings)
    facts = result_in(tmp_path).training
    # Five passes over 18 answers, four a step.
    assert facts.steps == 23 == facts.curve[-1][0] and facts.learning_rate == 4e-3
    (report,) = tmp_path.glob("*.md")
    assert "|      23 |" in report.read_text() and "0.004" in report.read_text()


@pytest.mark.parametrize(("more", "words"), [
    ({"loss": "cross_entropy", "top_k_targets": 5}, "--top_k_targets: 5 asks for the target's distributions"),
    ({"loss": "cross_entropy", "on_policy": 0.5}, "--on_policy: 0.5 asks for the target's distributions"),
    ({"top_k_targets": 5, "on_policy": 0.5}, "--top_k_targets: 5 stores judgements of the target's answers alone"),
    ({"draft_precision": "int8"}, "--draft_precision: 'int8' can't be trained; leave it out"),
    ({"drafter": "suffix"}, "--drafter: 'suffix' is not a model"),
    ({"model_name": "synthetic:smollm-135m"}, "--model_name: 'synthetic:smollm-135m' has random weights"),
    ({"dataset": "embedded", "split": "train"}, "--split: 'train' can't be chosen for the embedded data"),
    ({"dataset": "embedded:tap dance"}, "--dataset: 'tap dance' is not a subtask of the embedded data"),
    ({"limit": 1}, "--dataset: .* has too few different prompts"),
    ({"top_k_targets": 321}, "--top_k_targets: 321 exceeds the vocabulary; give at most 320"),
    ({"model_name": "target"}, "--assistant_model: .*draft' has another vocabulary than the target 'target'"),
], ids=lambda value: value if isinstance(value, str) else None)  # fmt: skip
def test_refusals(more: dict[str, Any], words: str, asked, tmp_path) -> None:
    settings = replace(asked(), **more)
    if settings.dataset.startswith("embedded"):
        settings = replace(settings, prompt_column=None)
    with pytest.raises(BenchError, match=words):
        run_task(settings)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_missing_packages_are_named(monkeypatch) -> None:
    monkeypatch.setattr(task, "find_spec", lambda name: None if name == "peft" else object())
    with pytest.raises(BenchError, match=r"--lora_rank: 4 needs peft, .* pip install 'hf_specdec\[align\]'"):
        task.run(Settings(task="align", lora_rank=4), ALONE)
    task.check_arguments(Settings(task="align"))
    monkeypatch.setattr(task, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="--task: 'align' needs accelerate"):
        task.run(Settings(task="align"), ALONE)


def test_no_prompt_is_learned_and_judged() -> None:
    learned, held_out = task.prompts(Settings(task="align", dataset="embedded:qa", limit=20))
    assert len(learned) == 20 and len(held_out) == task.MOST_HELD_OUT
    assert {dialogue[0].subtask for dialogue in [*learned, *held_out]} == {"qa"}
    assert not {dialogue[0].turns for dialogue in learned} & {dialogue[0].turns for dialogue in held_out}
    with pytest.raises(BenchError, match=r"--held_out: 0\.5 can't be chosen for the embedded data"):
        task.prompts(Settings(task="align", dataset="embedded:qa", held_out=0.5))


def test_a_share_is_held_out(questions_file: Path) -> None:
    """Spread over the data; no prompt is in both."""
    settings = Settings(task="align", dataset=str(questions_file), prompt_column="q", held_out=0.5)
    learned, held_out = task.prompts(settings)
    assert len(learned) == len(held_out) == 10
    assert not {one[0].turns for one in learned} & {one[0].turns for one in held_out}
    assert [one[0].index for one in held_out] == list(range(0, 20, 2))
    all_of_them = task.prompts(Settings(task="align", limit=2))
    assert len(all_of_them[0]) == 16 and len(all_of_them[1]) == task.MOST_HELD_OUT


def test_two_processes_align_as_one_does(asked, kinds, questions_file: Path, tmp_path) -> None:
    """They share prompts and steps; one speaks and saves."""
    target, draft = map(str, kinds["decoder"])
    line = ["scripts/assisted_generation.py", "--task", "align", "--device", "cpu", "--model_name", target]
    line += ["--assistant_model", draft, "--dataset", str(questions_file), "--prompt_column", "q", "--repeats", "1"]
    line += ["--max_new_tokens", "8", "--steps", "20", "--batch_size", "2", "--learning_rate", "3e-3"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *line,
         "--output_dir", str(tmp_path / "two")],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().count("acceptance went from") == 1, "only one process speaks"
    facts, aligned = result_in(tmp_path / "two").training, tmp_path / "two" / "draft-aligned"
    assert facts is not None and facts.rows == 4 and facts.prompts == 18
    assert facts.saved == (str(aligned) if "The draft is in" in done.stdout else None)
    assert aligned.exists() == (facts.saved is not None)
    settings = asked(output_dir=tmp_path / "one", batch_sizes=(2,))
    alone = list(answered(settings, load_pair(settings)))
    (folder,) = (tmp_path / "two").glob("answers-*")
    parts = [datasets.load_from_disk(part) for part in (folder / "learned").iterdir()]
    assert len(parts) == 2 and list(datasets.concatenate_datasets(parts).sort("index")) == alone
