"""Answers are replayed in exactly the rounds in which they were decoded, without decoding."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import EOS, VOCABULARY, llama, noisy
from helpers.tiny_pair import save_pair, tokenizer

import hf_specdec
from hf_specdec.bench import results
from hf_specdec.bench.figures.frames import frame
from hf_specdec.bench.figures.passes import Costs
from hf_specdec.bench.inputs import logs
from hf_specdec.bench.models.loading import LoadedPair
from hf_specdec.bench.records import Result
from hf_specdec.bench.replaying import rounds
from hf_specdec.bench.replaying.draft_models import PredictedDrafter, predicted
from hf_specdec.bench.replaying.rounds import Known, replayed
from hf_specdec.bench.replaying.times import RoundTimes
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import run_task
from hf_specdec.rules.round_statistics import Round

NEW_TOKENS = 40
TIMES = RoundTimes(Costs({1: 0.25}, {1: 1.0, 2: 1.0, 17: 2.5}), look_up=0.125)
FLAT = {"target": {"1": 10, "17": 10}}


@pytest.fixture(scope="module")
def loaded() -> LoadedPair:
    target = llama()
    return LoadedPair("target", target, tokenizer(), "draft", noisy(target, 0.1), tokenizer())


@pytest.fixture(params=[None, 1.3], ids=["", "penalty"])
def pair(loaded: LoadedPair, request) -> Iterator[LoadedPair]:
    loaded.target.generation_config.repetition_penalty = request.param
    yield loaded
    loaded.target.generation_config.repetition_penalty = None


def decoded(pair: LoadedPair, row: int, tokens: int, drafter: str, **how: Any) -> tuple[Known, list[Round]]:
    """A real call's text and rounds."""
    ids = torch.randint(2, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(row))
    torch.manual_seed(row)
    with hf_specdec.enable(pair.target):
        output = pair.target.generate(
            ids, max_new_tokens=NEW_TOKENS, assistant_model=pair.draft, drafter=drafter, num_assistant_tokens=tokens,
            generation_strategy="speculative", return_dict_in_generate=True, **how,
        )  # fmt: skip
    text = output.sequences[0].tolist()
    return Known(text[:12], text[12:], (EOS,), NEW_TOKENS), output.speculation.rounds


def rounds_of(
    pair: LoadedPair,
    text: Known,
    tokens: int,
    drafter: str,
    answer: Known | None = None,
    memory: hf_specdec.SuffixMemory | None = None,
    prepared: bool = False,
) -> list[Round]:
    """The replay, of this text with the drafts for another `answer`."""
    shown = answer or text
    view = predicted(pair, shown.prompt, shown.answer, Settings(task="replay", max_new_tokens=NEW_TOKENS))
    by_model = partial(
        PredictedDrafter, start=len(text.prompt), found=view, eos_tokens=frozenset(text.eos_tokens), compiled=prepared
    )
    config = hf_specdec.SpeculationConfig(drafter=drafter, num_assistant_tokens=tokens, suffix_memory=memory)
    return replayed(config, text, pair.target, TIMES, by_model=by_model, prepared=prepared)


def told(rounds: list[Round]) -> list[tuple[Any, ...]]:
    return [(one.accepted, one.new_tokens, one.overlap) for one in rounds]


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["model", "suffix", "hybrid", "none"])
def test_a_replay_makes_the_rounds_of_a_greedy_call(pair: LoadedPair, drafter: str, tokens: int) -> None:
    accepted = 0
    for row in range(4):
        text, real = decoded(pair, row, tokens, drafter, do_sample=False)
        found = rounds_of(pair, text, tokens, drafter)
        assert told(found) == told(real)
        for one, other in zip(found, real, strict=True):
            # Behind its first mistake a draft may end in an EOS, which can't be known without drafting.
            mistaken = one.accepted[0] < min(one.drafted[0], other.drafted[0]) and drafter in ("model", "hybrid")
            assert mistaken or (one.drafted, one.draft_steps) == (other.drafted, other.draft_steps)
        accepted += sum(one.accepted[0] for one in real)
    assert accepted > 0 or drafter == "none" or pair.target.generation_config.repetition_penalty


@pytest.mark.parametrize("tokens", [3, 12])
@pytest.mark.parametrize("drafter", ["model", "suffix", "hybrid", "none"])
def test_a_replay_makes_the_rounds_of_a_prepared_call(
    loaded: LoadedPair, drafter: str, tokens: int, fast_rounds: list[Any]
) -> None:
    """With their widths, of which there are fewer than in general rounds. At the end of a text they may be shorter."""
    widths: list[set[int]] = [set(), set()]
    made = 0
    for row in range(4):
        text, real = decoded(loaded, row, tokens, drafter, do_sample=False, cache_implementation="static")
        found = rounds_of(loaded, text, tokens, drafter, prepared=True)
        assert told(found) == told(real)
        shapes = [[(one.draft_steps, one.width) for one in some[1:] if one.room[0] >= tokens] for some in (found, real)]
        assert shapes[0] == shapes[1]
        made += len(real)
        for seen, prepared in zip(widths, (True, False), strict=True):
            seen.update(one.width for one in rounds_of(loaded, text, tokens, drafter, prepared=prepared)[1:])
    assert len(fast_rounds) == made
    assert widths[0] < widths[1] or (drafter, tokens) not in (("suffix", 12), ("hybrid", 12))


@pytest.mark.parametrize("drafter", ["model", "suffix"])
def test_other_answers_are_replayed_in_other_rounds(loaded: LoadedPair, drafter: str) -> None:
    text, real = decoded(loaded, 0, 3, drafter, do_sample=False)
    other, _ = decoded(loaded, 1, 3, drafter, do_sample=False)
    mixed = Known(text.prompt, other.answer, (EOS,), NEW_TOKENS)
    assert told(rounds_of(loaded, mixed, 3, drafter, answer=text)) != told(real)


def test_the_overlap_is_that_of_a_call_that_drew_the_answer(loaded: LoadedPair) -> None:
    text, real = decoded(loaded, 2, 4, "model", do_sample=True, temperature=0.8, top_k=20)
    sampled = Settings(task="replay", do_sample=True, temperature=0.8, top_k=20, max_new_tokens=NEW_TOKENS)
    view = predicted(loaded, text.prompt, text.answer, sampled)
    place = 0
    for one in real:
        reached = view.overlap[place : place + one.reached[0]]
        assert one.overlap[0] == pytest.approx(sum(reached), abs=1e-5)
        place += one.new_tokens[0]
    draws = [view.drawn(text.answer, 64, seed).tokens for seed in range(500)]
    agreed = torch.tensor(draws).eq(torch.tensor(text.answer)).double().mean(dim=0)
    assert torch.allclose(agreed, torch.tensor(view.overlap).double(), atol=0.12)  # five standard deviations
    own = LoadedPair("target", loaded.target, loaded.tokenizer, "target", loaded.target, loaded.tokenizer)
    assert predicted(own, text.prompt, text.answer, sampled).overlap == pytest.approx((1.0,) * len(text.answer))


@pytest.mark.parametrize("tokens", [3, 8])
def test_remembered_answers_are_copied_in_the_rounds_of_real_calls(loaded: LoadedPair, tokens: int) -> None:
    """The third call repeats the first. An emptied memory is the control."""
    real, kept, emptied = hf_specdec.SuffixMemory(), hf_specdec.SuffixMemory(), hf_specdec.SuffixMemory()
    counts = []
    for row in (0, 1, 0):
        text, decoded_in = decoded(loaded, row, tokens, "suffix", do_sample=False, suffix_memory=real)
        found = rounds_of(loaded, text, tokens, "suffix", memory=kept)
        assert told(found) == told(decoded_in) and len(kept) == len(real)
        emptied.clear()
        counts.append((len(found), len(rounds_of(loaded, text, tokens, "suffix", memory=emptied))))
        assert counts[-1][1] == len(rounds_of(loaded, text, tokens, "suffix"))
    assert counts[0][0] == counts[0][1] and counts[2][0] == -(-len(text.answer) // (tokens + 1)) < counts[2][1]


@pytest.fixture
def no_time_passes(monkeypatch) -> None:
    """Finding copies takes no time, so that times are exactly those of passes."""
    monkeypatch.setattr(rounds, "perf_counter", lambda: 0.0)


@pytest.mark.parametrize("drafter", ["model", "suffix"])
def test_rounds_take_the_times_of_their_passes(loaded: LoadedPair, drafter: str) -> None:
    text, _ = decoded(loaded, 0, 3, drafter, do_sample=False)
    for one in rounds_of(loaded, text, 3, drafter):
        assert one.draft_seconds == pytest.approx(0.25 * one.draft_steps if one.draft_steps else 0.125)
        assert one.verify_seconds == pytest.approx(1.0 + 0.1 * (one.width - 2) if one.width > 1 else 1.0)


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "log.jsonl"
    texts = ["the cat sat and the cat sat and the cat sat", "one two one two one two one two", "no and yes and no"]
    rows = [{"q": f"Say {text}", "a": text, "ids": [9, 8, 9, 8, 9, 8, 9]} for text in texts]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(log: Path, models: tuple[Path, Path], folder: Path, **more: Any) -> Result:
    settings: dict[str, Any] = {
        "task": "replay", "model_name": str(models[0]), "assisted_generation": True, "engines": ("recorded",),
        "dataset": str(log), "prompt_column": "q", "answer_column": "a", "max_new_tokens": 24, "output_dir": folder,
    }  # fmt: skip
    run_task(Settings(**settings | {"grid": {"num_assistant_tokens": (2, 4)}} | more))
    return results.load(next(folder.glob("replay-*.json.gz")))


def test_a_log_is_replayed_without_the_target(saved_pair, log, tmp_path, no_time_passes) -> None:
    result = run(log, saved_pair, tmp_path, pass_times={**FLAT, "draft": 0}, assistant_model=str(saved_pair[1]))
    assert result.models["target"].device == "not loaded" and not result.calls
    assert {one.method for one in result.replayed} >= {"none recorded", "suffix 2 recorded", "hybrid 4 recorded"}
    calls = frame(result.replayed, result.prompts)
    assert set(calls["accepted"][calls["method"] == "suffix 4 recorded"]) != {0}
    plain = calls[calls["method"] == "none recorded"]
    assert list(plain["seconds"]) == pytest.approx(list(0.01 * plain["new_tokens"]))
    report = next(tmp_path.glob("*.md")).read_text()
    assert "Best by prediction" in report and "Replayed and measured" not in report


@pytest.mark.parametrize("order", [(0, 0, 1), (1, 0, 0)])
def test_each_answer_is_remembered_for_the_next_ones(
    order: tuple[int, ...], saved_pair: tuple[Path, Path], tmp_path, no_time_passes: None
) -> None:
    """Only the answer after its like gains, in every repeat; the first gains nothing, also where "auto" warmed up."""
    texts = [list(range(20, 44)), list(range(50, 74))]
    log, lookaheads = tmp_path / "log.jsonl", {"num_assistant_tokens": (4, "auto")}
    log.write_text("".join(json.dumps({"q": [9, at], "a": texts[one]}) + "\n" for at, one in enumerate(order)))
    result = run(log, saved_pair, tmp_path, pass_times=FLAT, do_sample=True, repeats=2, grid=lookaheads)
    calls = frame(result.replayed, result.prompts).groupby(["method", "repeat"])["rounds"].agg(list)
    for tokens, repeat in ((4, 0), (4, 1), ("auto", 0), ("auto", 1)):
        without, remembering = (calls[f"suffix {tokens} recorded{role}", repeat] for role in ("", " remembering"))
        gains = [one > other for one, other in zip(without, remembering, strict=True)]
        assert gains == [at > 0 and order[at] == order[at - 1] for at in range(3)]
        assert tokens == "auto" or min(remembering) == 6, "a token after a prompt that is new, then 23"
    assert "suffix, remembering earlier answers" in next(tmp_path.glob("*.md")).read_text()
    log.write_text(log.read_text().splitlines()[0])
    assert not any(one.role for one in run(log, saved_pair, tmp_path / "one", pass_times=FLAT, grid=lookaheads).methods)


@pytest.mark.parametrize(("name", "rows"), [("code_edits", 12), ("shell_session", 23)])
def test_the_logs_at_hand_are_replayed(name: str, rows: int, tmp_path, no_time_passes: None) -> None:
    """With the embedded tokenizer and without weights. In front of other answers, prompts help less."""
    log = Path(logs.__file__).with_name(f"{name}.jsonl")
    more = {"prompt_column": "prompt", "answer_column": "answer", "pass_times": FLAT, "max_new_tokens": 512}
    texts = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    shifted = [one | {"prompt": other["prompt"]} for one, other in zip(texts, texts[-1:] + texts[:-1], strict=True)]
    (control := tmp_path / "shifted.jsonl").write_text("\n".join(map(json.dumps, shifted)))
    rounds_needed = []
    for path in (log, control):
        result = run(path, (Path("target"), Path()), tmp_path / path.stem, grid={"num_assistant_tokens": (4,)}, **more)
        assert len(result.prompts) == rows and not result.calls
        rounds_needed.append(sum(one.rounds for one in result.replayed if one.method == "suffix 4 recorded"))
    assert rounds_needed[0] < rounds_needed[1]


def test_token_ids_are_taken_as_they_are(saved_pair: tuple[Path, Path], log: Path, tmp_path) -> None:
    result = run(log, saved_pair, tmp_path, pass_times=FLAT, prompt_column="ids", answer_column="ids")
    assert {one.tokens for one in result.prompts} == {7} and {one.new_tokens for one in result.replayed} == {7}


def test_a_check_decodes_too(saved_pair: tuple[Path, Path], log: Path, tmp_path) -> None:
    more = {"assistant_model": str(saved_pair[1]), "dtype": "float64", "answer_column": None, "check": True}
    result = run(log, saved_pair, tmp_path, **more)
    calls, measured = (frame(some, result.prompts).groupby("method") for some in (result.replayed, result.calls))
    for name in ("model 4 recorded", "suffix 2 recorded", "hybrid 4 recorded", "none recorded"):
        for column in ("accepted", "row_rounds", "new_tokens"):
            assert calls[column].sum()[name] == measured[column].sum()[name]
    report = next(tmp_path.glob("*.md")).read_text()
    assert (
        "Tokens/Round, fixed lookahead: at most 0.0% apart." in report
        and "Verification on the recorded engine" in report
    )


@pytest.mark.parametrize(("more", "words"), [
    ({"answer_column": "b"}, "--answer_column: 'b' is not in row 1, which has a, ids, q"),
    ({"pass_times": {"target": {"2": 3}}}, "--pass_times: give milliseconds of the target's passes"),
    (
        {"pass_times": {"target": 3}, "answer_column": None},
        "--pass_times: give milliseconds of the target's passes",
    ),
    ({"grid": {"drafter": ("hybrid",)}}, "--drafter: 'hybrid' needs a draft model here"),
    ({"engines": ("llama.cpp-f32",)}, "--engines: llama.cpp-f32 is for --task engines"),
    ({"model_name": "synthetic:tiny-llama"}, "--model_name: 'synthetic:tiny-llama' has random weights"),
    ({"dataset": "embedded"}, "--prompt_column: 'q' does not apply to embedded"),
])  # fmt: skip
def test_what_cannot_be_replayed_is_refused(more: dict[str, Any], words: str, saved_pair, log, tmp_path) -> None:
    with pytest.raises(BenchError) as caught:
        run(log, saved_pair, tmp_path, **{"pass_times": FLAT} | more)
    assert str(caught.value).startswith(words)
    assert not list(tmp_path.glob("replay*")), "nothing was decoded"


def test_an_encoder_decoder_is_refused(log: Path, tmp_path) -> None:
    with pytest.raises(BenchError, match="give a decoder-only one"):
        run(log, save_pair(tmp_path, encoder_decoder=True), tmp_path, pass_times=FLAT)
