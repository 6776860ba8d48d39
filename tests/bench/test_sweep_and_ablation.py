"""The tasks `sweep` and `ablation`: the methods that they compare, and their results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_specdec.bench.figures import speed
from hf_specdec.bench.figures.frames import whole
from hf_specdec.bench.inputs.prompts import Prompt
from hf_specdec.bench.models.loading import LoadedPair, load_pair, load_pairs
from hf_specdec.bench.models.names import known_drafts
from hf_specdec.bench.records import Method
from hf_specdec.bench.results import document, load, stem
from hf_specdec.bench.running.timed_call import timed_call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks import ablation, run_task, sweep
from hf_specdec.config import LOSSY_STRATEGIES, STRATEGY_SETTINGS
from hf_specdec.models.better_transformer import attention_of


@pytest.fixture(scope="module")
def asked(saved_pair: tuple[Path, Path], tmp_path_factory) -> Callable[..., Settings]:
    """Settings of a task for three short questions, so that runs are short too."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"q": f"How much is {n} and {n}?", "a": str(2 * n)} for n in (2, 3, 4)]
    (folder / "three.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    target, draft = map(str, saved_pair)
    return lambda task="sweep", **more: Settings(
        task=task, model_name=target, assistant_model=draft, assisted_generation=True, max_new_tokens=9,
        dataset=str(folder / "three.jsonl"), prompt_column="q", reference_column="a", output_dir=folder / task,
        **{"repeats": 2, **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def drafts(saved_pair: tuple[Path, Path]) -> tuple[str, ...]:
    """Two: the second is the target itself."""
    return str(saved_pair[1]), str(saved_pair[0])


@pytest.fixture(scope="module")
def pairs(asked, drafts: tuple[str, ...]) -> list[LoadedPair]:
    return load_pairs(asked(), drafts)


@pytest.fixture
def contest(asked, pairs: list[LoadedPair]) -> Callable[..., list[Method]]:
    """What the methods of a sweep's grid are, with so many drafts."""

    def methods(drafts: int = 1, **more: Any) -> list[Method]:
        found = [one.method for one in sweep.grid(asked(**more), pairs[:drafts])]
        assert len({method.name for method in found}) == len(found), "names tell rows apart"
        return found

    return methods


def test_a_sweep_tries_all_lookaheads_auto_the_entropy_stop_and_both(contest, pairs) -> None:
    found = contest(drafts=2)
    assert [method.kind for method in found[:6]] == ["plain", "none", *["assisted"] * 4]
    for pair in pairs:
        mine = [method for method in found[6:] if method.draft == pair.draft_name]
        assert [method.lookahead for method in mine] == [*sweep.LOOKAHEADS, sweep.STOP_LOOKAHEAD, "auto"]
        assert "auto" in sweep.LOOKAHEADS
        assert {method.keywords.get("entropy_threshold") for method in mine[-2:]} == {sweep.STOP_ENTROPY}
        assert {method.kind for method in mine} == {"speculative"}
    assert len(found) == 6 + 2 * (len(sweep.LOOKAHEADS) + 2)


def test_a_sweep_crosses_what_it_is_given(contest) -> None:
    grid = {
        "num_assistant_tokens": (2, "auto"), "verification": ("token", "block"), "drafter": ("model", "hybrid"),
        "entropy_threshold": (0.3, 0.5), "compile": (False, True),
    }  # fmt: skip
    found = [method for method in contest(grid=grid) if method.kind == "speculative"]
    assert len(found) == 2**5
    for name, values in grid.items():
        assert {method.keywords.get(name, False) for method in found} == set(values)
    baselines = [m.name for m in contest(grid=grid) if m.kind == "none"]
    assert baselines == ["none recorded", "none compiled"]
    assert {method.same_engine for method in found} == set(baselines)


def test_thresholds_bring_bild_in(contest) -> None:
    grid = {"fallback_threshold": (0.0, 0.1), "rollback_threshold": (0.0, 3.0, 5.0)}
    found = contest(drafts=2, grid=grid)
    bild = [method for method in found if method.kind == "bild"]
    places = {(m.draft, m.keywords["fallback_threshold"], m.keywords["rollback_threshold"]) for m in bild}
    assert len(bild) == len(places) == 2 * 2 * 3
    # At the usual lookahead, beside speculative decoding at the same.
    assert {m.lookahead for m in found if m.kind in ("bild", "speculative")} == {4}
    assert sum(method.kind == "speculative" for method in found) == 2
    assert [m.kind for m in contest(generation_strategy="bild")][-1] == "bild"


def test_lossy_strategies_come_with_their_own_settings_alone(contest) -> None:
    grid = {"lenience": (0.5, 0.1), "assistant_ensemble_weight": (0.3,), "drafter": ("model", "hybrid")}
    found = [m for m in contest(grid=grid) if m.kind in LOSSY_STRATEGIES]
    own = {name for names in STRATEGY_SETTINGS.values() for name in names}
    told = [(m.kind, m.keywords["drafter"], *(v for k, v in m.keywords.items() if k in own)) for m in found]
    lenient = [("lenient", drafter, value) for value in (0.5, 0.1) for drafter in ("model", "hybrid")]
    assert told == [*lenient, ("ensemble", "model", 0.3)], "an ensemble can't mix copies"
    named = contest(generation_strategy="typical")
    assert [m.keywords.get("posterior_threshold") for m in named if m.kind == "typical"] == [0.09]


def test_a_sweep_from_end_to_end(asked, drafts) -> None:
    grid = {"num_assistant_tokens": (3,), "fallback_threshold": (0.1,), "rollback_threshold": (0.0, 3.0)}
    grid |= {"lenience": (1.0, 0.01)}
    settings = asked(draft_models=drafts, grid=grid, repeats=1)
    run_task(settings)
    result = load(settings.output_dir / f"{stem(settings)}.json.gz")
    assert len(result.methods) == 2 + 4 + 2 + 4 + 4 and len(result.calls) == len(result.methods) * 3
    assert len(result.loading_seconds) == 2, "one target, which is a draft of its own, and its draft"
    # In float64 rows that are lossless leave plain decoding nowhere: BiLD too, where nothing is tolerated.
    for prompt in result.prompts:
        lossy = ("rollback_threshold=3", "lenience=0.01")
        assert all(any(word in name for word in lossy) for name in prompt.divergences), prompt
    assert any(prompt.divergences for prompt in result.prompts)
    text, pictures = document(result, "sweep", sweep.render)
    assert "## Lossy strategies" in text and "Lenience 0.01" in text
    assert all(draft not in text.partition("## Drafts")[2].partition("## Best")[0] for draft in drafts), "short names"
    assert set(pictures) <= {"sweep-speed-and-quality.png"}, "where quality differs"
    assert {(item.engine, item.draft) for item in result.passes} == {
        (engine, draft) for engine in ("generate", "recorded") for draft in drafts
    }


def test_a_sweep_compares_automatic_lookaheads_with_the_fastest_fixed_one(asked) -> None:
    """Also with plain decoding, and without a draft model."""
    grid = {"num_assistant_tokens": (3, "auto"), "drafter": ("model", "suffix")}
    settings = asked(grid=grid, repeats=1)
    run_task(settings)
    part = whole(load(settings.output_dir / f"{stem(settings)}.json.gz"))
    text = document(part.result, "sweep", sweep.render)[0].partition("## Automatic lookaheads")[2]
    rows = [line for line in text.partition("## Cold")[0].splitlines() if "auto" in line]
    assert len(rows) == 2 and all("–" not in row for row in rows)
    for method in part.methods:
        best = sweep.best_fixed(part, method) if method.lookahead == "auto" else None
        assert best is None or best.lookahead != "auto"
        for one in part.methods if best else ():
            if one.kind in ("none", "speculative") and one.lookahead != "auto" and one.draft in (None, method.draft):
                assert speed.decode_rate(part.of(best.name)) >= speed.decode_rate(part.of(one.name))


def test_drafts_that_reports_would_call_alike_are_refused() -> None:
    named = Settings(task="sweep", draft_models=("all/draft-aligned", "qa/draft-aligned"))
    with pytest.raises(BenchError, match=r"--draft_models.*'draft-aligned'"):
        sweep.drafts_of(named)
    assert len(sweep.drafts_of(Settings(draft_models=("all/draft", "qa/draft-aligned")))) == 2


def test_drafts_without_being_named() -> None:
    assert sweep.drafts_of(Settings(model_name="target")) == ("draft", "draft-small", "draft-large")
    assert sweep.drafts_of(Settings(model_name="opt-6.7b")) == known_drafts("facebook/opt-6.7b")
    assert len(known_drafts("facebook/opt-6.7b")) > 1, "all that are known"
    assert sweep.drafts_of(Settings(model_name="x", assistant_model="y")) == ("y",)
    assert sweep.drafts_of(Settings(model_name="x", draft_models=("opt-350m",))) == ("facebook/opt-350m",)
    with pytest.raises(BenchError, match="--draft_models: not given"):
        sweep.drafts_of(Settings(model_name="draft-small"))
    with pytest.raises(BenchError, match="--model_name: 'nobody/knows'"):
        sweep.drafts_of(Settings(model_name="nobody/knows"))


def test_rows_of_the_ablation(asked) -> None:
    settings = asked("ablation")
    found = [one.method for one in ablation.rows(settings, load_pair(settings))]
    rows = {(m.kind, m.cache, m.better_transformer): m for m in found}
    switches = [(cache, better) for cache in (False, True) for better in (False, True)]
    assert list(rows) == [
        (kind, *switch)
        for switch in switches
        for kind in ("plain", "none", *(["assisted"] if switch[0] else []), "speculative")
    ]
    for (kind, *switch), method in rows.items():
        assert (method.draft is not None) == (kind in ("assisted", "speculative"))
        if kind == "speculative":
            assert method.same_engine == rows[("none", *switch)].name


def test_rows_really_differ_in_attention_and_cache(asked) -> None:
    settings = asked("ablation")
    pair = load_pair(settings)
    prompt, texts = Prompt(0, "x", tuple(range(5, 25))), []
    for method in ablation.rows(settings, pair):
        texts.append(timed_call(method, [prompt], settings).tokens)
        better = method.method.better_transformer
        assert {attention_of(model) for model in pair.models} == {"sdpa" if better else "eager"}
        assert method.options["use_cache"] is method.method.cache
    assert all(text == texts[0] for text in texts)


def test_models_without_better_transformer_are_refused(asked, monkeypatch) -> None:
    monkeypatch.setattr("hf_specdec.bench.models.loading.better_transformer_refusal", lambda model: "this one can't")
    with pytest.raises(BenchError, match="--better_transformer: this one can't"):
        run_task(asked("ablation"))
