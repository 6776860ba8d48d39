"""The pictures: what is drawn is what was measured, with its interval; titles state no finding."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image

from hf_specdec.bench.figures import passes, quality, rounds, speed, tradeoff
from hf_specdec.bench.figures.bootstrap import Interval
from hf_specdec.bench.reports.best_settings import methods_of
from hf_specdec.bench.reports.pictures import ablation, engines, gains, pairs, subtasks, sweep
from hf_specdec.bench.reports.pictures import rounds as round_pictures
from hf_specdec.bench.reports.pictures import tradeoff as tradeoff_pictures
from hf_specdec.bench.reports.pictures.by_task import pictures
from hf_specdec.bench.reports.pictures.drawing import BY_KIND, KIND_NAMES, new_figure, png, ratio_panel, wide_enough
from hf_specdec.bench.reports.tables import methods

Result = dict[str, Any]


@pytest.fixture(scope="module")
def drawn(results: dict[str, Result]) -> dict[str, dict[str, Figure]]:
    return {task: pictures(result) for task, result in results.items()}


def points(axes: Axes, horizontal: bool = True) -> list[tuple[float, float, float]]:
    """(value, low, high) of every point with an interval."""
    found = []
    for container in axes.containers:
        if isinstance(container, ErrorbarContainer):
            line, _, bars = container.lines
            # Where both directions have an interval, the horizontal one comes first.
            (start, end) = bars[0].get_segments()[0]
            axis = 0 if horizontal else 1
            found.append((float(line.get_data()[axis][0]), float(start[axis]), float(end[axis])))
    return found


def as_drawn(found: Interval) -> tuple[float, float, float]:
    low = found.value if found.low is None else min(found.low, found.value)
    high = found.value if found.high is None else max(found.high, found.value)
    return found.value, low, high


def close(found: Iterable[tuple[float, float, float]]) -> list[Any]:
    """To be compared with, but for rounding."""
    return [pytest.approx(item) for item in found]


def test_each_task_has_its_pictures(drawn: dict[str, dict[str, Figure]]) -> None:
    around = {"time-per-round", "acceptance-by-position"}
    assert set(drawn["benchmark"]) == {"gain-by-method", "waterfall"} | around
    for task in ("subtasks", "sampling"):
        assert set(drawn[task]) >= {f"speedup-by-subtask-over-{which}" for which in ("engine", "plain")} | around
    assert {"speedup-by-lookahead", *(f"thresholds-draft-{la}" for la in (1, 2, 3, "auto"))} <= set(drawn["sweep"])
    assert set(drawn["ablation"]) == {"gains"}
    assert set(drawn["engines"]) == {"gain-by-method", "waterfall", "tokens-until-it-pays", "gain-by-batch"}


def test_axes_and_titles_say_what_is_drawn(drawn: dict[str, dict[str, Figure]]) -> None:
    for found in drawn.values():
        for name, figure in found.items():
            title = figure.get_suptitle()
            assert title and not {"×", "%", "faster"} & set(title.replace("(", " ").split()), name
            shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
            assert all(axes.get_xlabel() for axes in shown), name
            # Panels side by side share the first one's.
            assert shown[0].get_ylabel() or shown[0].get_yticklabels(), name


def test_files_are_small_and_of_a_page_s_width(drawn: dict[str, dict[str, Figure]]) -> None:
    for found in drawn.values():
        for name, figure in found.items():
            data = png(figure)
            assert len(data) < 60_000, name
            assert Image.open(io.BytesIO(data)).width == 840


def test_gains_are_drawn_with_their_intervals_and_sorted(results: dict[str, Result]) -> None:
    result = results["benchmark"]
    over_engine, over_plain = gains.gain_by_method(result).axes
    ours = [m for m in result["methods"] if m["kind"] != "plain"]
    expected = [speed.speedup(result, m["name"], "plain") for m in ours]
    shown = points(over_plain)
    assert shown == sorted(shown, reverse=True)
    assert sorted(shown) == close(sorted(as_drawn(item) for item in expected if item))
    same = speed.speedup(result, "speculative", "none eager")
    assert same is not None and points(over_engine) == close([as_drawn(same)])
    for axes in (over_engine, over_plain):
        assert any(list(line.get_xdata()) == [1, 1] for line in axes.lines), "a line at 1"


def test_points_whose_interval_includes_1_are_hollow() -> None:
    _, (axes,) = new_figure(2)
    shown = {"sure": Interval(1.2, 1.1, 1.3), "not": Interval(1.2, 0.9, 1.3), "without": Interval(1.2, None, None)}
    ratio_panel(axes, [(name, found, "#0072B2") for name, found in shown.items()])
    faces = [to_hex(c.lines[0].get_markerfacecolor()) for c in axes.containers]
    assert faces == ["#0072b2", "#ffffff", "#0072b2"]


def test_the_waterfall_separates_the_engine_from_the_draft(results: dict[str, Result]) -> None:
    result = results["engines"]
    (axes,) = gains.waterfall(result, 1).axes
    names = [label.get_text().replace("\n", " ") for label in axes.get_xticklabels()]
    assert names == ["plain generate()", "plain, eager", "speculative, eager", "plain, static cache",
                     "speculative, static cache"]  # fmt: skip
    best = speed.fastest(result, batch=1, kind="speculative", engine="eager")
    assert best is not None
    shown = [
        best["name"] if place == 2 else name for place, name in enumerate(["plain", "none eager", "", "none static"])
    ]
    heights = [bar.get_height() for bar in axes.patches]
    rates = [speed.decode_rate(speed.calls_of(result, name, batch=1)) for name in shown]
    assert heights[:4] == pytest.approx(rates)
    gain = speed.speedup(result, best["name"], "none eager", batch=1)
    assert gain is not None and f"{gain.value:.2f}" in axes.texts[2].get_text()
    assert "over plain, eager" in axes.texts[2].get_text()


def test_findings_beneath_a_picture_follow_from_the_interval(results: dict[str, Result]) -> None:
    def timed(factor: float) -> Result:
        result = copy.copy(results["benchmark"])
        result["calls"] = [
            replace(call, first_seconds=0.01, seconds=0.01 + (1 + 0.3 * (call.prompt % 2)) / (
                factor * (0.5 + call.prompt % 3) if call.method == "speculative" else 1))
            for call in result["calls"]
        ]  # fmt: skip
        return result

    def sentences(result: Result) -> str:
        return str(gains.waterfall(result).get_supxlabel())

    assert "drafting decodes at" in sentences(timed(40.0))
    unsure = timed(1.5)
    gain = speed.speedup(unsure, "speculative", "none eager")
    assert gain is not None and not gain.faster and not gain.slower, "the control"
    assert "drafting decodes at" not in sentences(unsure)


def test_speedups_by_subtask_are_those_of_its_examples(results: dict[str, Result]) -> None:
    result = results["subtasks"]
    axes = subtasks.speedup_by_subtask(result, "engine").axes[0]
    expected = [
        speed.speedup(result, m["name"], m["same_engine"], prompts=tradeoff.prompts_of(result, label))
        for label in [*tradeoff.labels(result), None]
        for m in result["methods"]
        if m["same_engine"] and m["kind"] != "none"
    ]
    assert points(axes) == close(as_drawn(item) for item in expected if item)


def test_acceptance_has_counts_and_fades_where_few_tokens_tell(
    results: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_pictures, "FEW", 10)
    result = results["benchmark"]
    axes = round_pictures.acceptance_by_position(result).axes[0]
    found = [rounds.acceptance_by_position(speed.distinct_calls(result, m["name"])) for m in result["methods"]]
    expected = [position for positions in found if len(positions) > 1 for position in positions]
    assert points(axes, horizontal=False) == close((p.share, p.low, p.high) for p in expected)
    alphas = [container.lines[0].get_alpha() for container in axes.containers]
    assert [alpha < 1 for alpha in alphas] == [p.reached < round_pictures.FEW for p in expected]
    assert any(alpha < 1 for alpha in alphas) and any(alpha == 1 for alpha in alphas), "both are met here"
    assert f"n = {expected[0].reached:,} …" in axes.get_legend().get_texts()[0].get_text()


def test_measured_and_predicted_speedups_over_the_lookahead(results: dict[str, Result]) -> None:
    result = results["sweep"]
    axes = sweep.speedup_over_lookahead(result).axes[0]
    rows = methods_of(result, "speculative")
    expected = [speed.speedup(result, m["name"], "none eager") for m in rows]
    assert points(axes, horizontal=False) == close(as_drawn(item) for item in expected if item)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "3", "auto"]
    dotted = next(line for line in axes.lines if line.get_linestyle() == ":" and len(line.get_xdata()))
    predicted = [passes.predicted(result, m) for m in rows if isinstance(m["lookahead"], int)]
    assert list(dotted.get_ydata()) == pytest.approx(predicted)


@pytest.mark.parametrize("every", [False, True])
def test_the_entropy_stop_is_told_by_squares(every: bool, results: dict[str, Result]) -> None:
    """Also where all of a sweep's drafts have it."""
    result = deepcopy(results["sweep"])
    rows = methods_of(result, "speculative")
    for method in rows if every else rows[-1:]:
        method["keywords"]["entropy_threshold"] = 0.5
    axes = sweep.speedup_over_lookahead(result).axes[0]
    marked = [container.lines[0].get_marker() for container in axes.containers]
    assert marked.count("s") == (len(rows) if every else 1) and set(marked) <= {"s", "o"}
    assert "with the entropy stop" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_maps_of_a_sweep_share_one_colour_scale(results: dict[str, Result]) -> None:
    result = results["sweep"]
    scales = {
        place: {sweep.threshold_maps(result, m["draft"], m["lookahead"]).axes[place].images[0].get_clim()
                for m in methods_of(result, "bild")}
        for place in (0, 1)
    }  # fmt: skip
    for found, span in zip(scales.values(), (0.2, 2.0), strict=True):
        ((low, high),) = found
        assert high - low >= span - 1e-9


def test_unknown_cells_of_a_map_are_left_open(results: dict[str, Result]) -> None:
    result = copy.copy(results["sweep"])
    result["calls"] = [replace(c, tokens=[row[:1] for row in c.tokens], rounds=None) for c in result["calls"]]
    figure = sweep.threshold_maps(result, methods_of(result, "bild")[0]["draft"], 2)
    assert [text.get_text() for text in figure.axes[0].texts] == ["–"] * 4


def test_quality_is_drawn_as_measured(results: dict[str, Result]) -> None:
    result = copy.copy(results["subtasks"])
    references = {prompt["index"]: prompt["references"][0] for prompt in result["prompts"]}
    # BiLD answers one question right and plain decoding none.
    result["calls"] = [
        replace(call, texts=[references[call.prompt]]) if call.method == "bild" and call.prompt == 0 else call
        for call in result["calls"]
    ]
    assert tradeoff_pictures.quality_differs(result)
    axes = tradeoff_pictures.speed_against_quality(result).axes[0]
    expected = []
    for method in result["methods"]:
        change = quality.difference(result, method["name"], "plain", "rougeL", tradeoff.prompts_of(result, None))
        if method["kind"] != "plain" and change is not None:
            expected.append(as_drawn(change))
    assert points(axes) == close(expected)
    assert len({value for value, *_ in expected}) > 1
    low, high = axes.get_xlim()
    assert high - low >= 4.0


def test_the_ablation_draws_both_baselines(results: dict[str, Result]) -> None:
    result = results["ablation"]
    over_first, over_engine = ablation.ablation_gains(result).axes
    first = result["methods"][0]["name"]
    expected = [speed.speedup(result, m["name"], first) for m in result["methods"][1:]]
    assert sorted(points(over_first)) == close(sorted(as_drawn(item) for item in expected if item))
    assert len(points(over_engine)) == 4


def test_batch_sizes_are_drawn_over_plain_on_the_same_engine(results: dict[str, Result]) -> None:
    result = results["engines"]
    axes = engines.gain_by_batch(result).axes[0]
    expected = []
    for engine in ("eager", "static"):
        for batch in (1, 2, 3):
            best = speed.fastest(result, batch=batch, kind="speculative", engine=engine)
            assert best is not None
            expected.append(methods.over(result, best, "engine", batch=batch))
    assert points(axes, horizontal=False) == close(as_drawn(item) for item in expected if item)
    two = result | {"calls": [call for call in result["calls"] if call.batch < 3]}
    assert "gain-by-batch" not in pictures(two), "two points are no picture"


def paying(results: dict[str, Result]) -> tuple[Result, list[dict[str, Any]]]:
    """A result whose engines start later and decode faster from one to the next, and its fastest methods."""
    result = copy.copy(results["engines"])
    seconds = {"generate": 0.4, "eager": 0.2, "static": 0.1}  # a token
    engine_of = {m["name"]: m["engine"] for m in result["methods"]}

    def timed(call: Any) -> Any:
        extra = 0.01 if call.method.startswith("none") else 0.0
        after = sum(map(len, call.tokens)) - (call.batch if call.rounds is None else sum(call.rounds.new_tokens[0]))
        return replace(call, first_seconds=1.0, seconds=1.0 + after * (seconds[engine_of[call.method]] + extra))

    result["calls"] = [timed(call) for call in result["calls"]]
    result["loading_seconds"] = {}
    cold = {"plain": 0.0, "none eager": 2.0, "none static": 7.0}
    places = {m["name"]: place for place, m in enumerate(result["methods"])}
    result["cold"] = [
        item | {"seconds": [cold.get(item["method"], 0.0), 0.0], "number": places[item["method"]]}
        for item in result["cold"]
    ]
    best = [speed.fastest(result, batch=1, kind="speculative", engine=engine) for engine in ("eager", "static")]
    return result, [method for method in best if method is not None]


def test_costs_meet_where_a_method_pays(results: dict[str, Result]) -> None:
    """Two seconds more than plain generate() for 0.2 less a token, and five more than eager for 0.1 less."""
    result, best = paying(results)
    figure = engines.time_until_it_pays(result, 1)
    (axes,) = figure.axes
    marks = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]
    assert marks == [pytest.approx(item) for item in ((10, 4), (70 / 3, 28 / 3), (50, 12))]
    assert " ".join(figure.get_supxlabel().split()) == (
        "Over plain generate(): eager pays after 10 tokens, static cache pays after 23 tokens. "
        "Over eager: static cache pays after 50 tokens."
    )
    titles = [method["title"].rsplit(", ", 1)[0] for method in best]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == [
        "plain generate()", f"{titles[0]}, eager", f"{titles[1]}, static cache",
    ]  # fmt: skip


def test_engines_have_the_same_words_in_all_pictures(results: dict[str, Result]) -> None:
    result, _ = paying(results)
    (axes,) = gains.waterfall(result, 1).axes
    steps = {label.get_text().split("\n")[1] for label in axes.get_xticklabels()[1:]}
    for figure in (engines.time_until_it_pays(result, 1), engines.gain_by_batch(result)):
        labels = [text.get_text().split(":")[0].split(", ")[-1] for text in figure.axes[0].get_legend().get_texts()]
        assert steps == {label for label in labels if label != "plain generate()"} == {"eager", "static cache"}


def test_a_crossing_beyond_the_picture_is_only_said(results: dict[str, Result]) -> None:
    result, _ = paying(results)
    result["cold"] = [item | {"seconds": [1e6 * item["seconds"][0], 0.0]} for item in result["cold"]]
    figure = engines.time_until_it_pays(result, 1)
    (axes,) = figure.axes
    assert not [line for line in axes.lines if line.get_marker() == "o"]
    assert "eager pays after 10,000,000 tokens" in figure.get_supxlabel()


def once(result: Result) -> Result:
    """One call of each method at each batch size."""
    first = {(call.method, call.batch): call for call in reversed(result["calls"])}
    return result | {"calls": list(first.values())}


def test_where_methods_were_called_once_nothing_is_said_of_intervals(results: dict[str, Result]) -> None:
    def captions(result: Result) -> dict[str, str]:
        return {name: figure.get_supxlabel() for name, figure in pictures(result).items()}

    spoken = set()
    for task, result in results.items():
        spoken |= {name for name, text in captions(result).items() if "interval" in text}
        # Shares of accepted tokens have intervals of another kind, from their counts.
        said = {name: text for name, text in captions(once(result)).items() if name != "acceptance-by-position"}
        assert not [name for name, text in said.items() if "interval" in text or "ollow" in text], task
    assert {"gain-by-method", "waterfall", "gains", "gain-by-batch", "speedup-by-lookahead"} <= spoken, "the control"
    both = [results["subtasks"], results["sampling"]]
    assert "interval" in pairs.greedy_and_sampling(both).get_supxlabel()
    assert "interval" not in pairs.greedy_and_sampling([once(result) for result in both]).get_supxlabel()


def test_the_colours_of_methods_are_explained(results: dict[str, Result]) -> None:
    for figure, result in (
        (gains.gain_by_method(results["benchmark"]), results["benchmark"]),
        (ablation.ablation_gains(results["ablation"]), results["ablation"]),
    ):
        (shown,) = [legend for part in figure.subfigs for legend in part.legends]
        entries = zip(shown.get_texts(), shown.legend_handles, strict=True)
        names = {text.get_text(): handle.get_color() for text, handle in entries}
        drawn = {container.lines[0].get_color() for axes in figure.axes for container in axes.containers}
        assert set(names.values()) == drawn
        assert all(names[KIND_NAMES[m["kind"]]] == BY_KIND[m["kind"]] for m in result["methods"][1:])
    assert set(KIND_NAMES) == set(BY_KIND)


def test_greedy_stands_beside_sampling(results: dict[str, Result]) -> None:
    both = [results["subtasks"], results["sampling"]]
    left, right = pairs.greedy_and_sampling(both).axes
    assert left.get_xlabel().endswith("greedy") and right.get_xlabel().endswith("sampling")
    for axes, result in zip((left, right), both, strict=True):
        gain = speed.speedup(result, "speculative", "plain")
        assert gain is not None and pytest.approx(as_drawn(gain)) in points(axes)


def test_colours_are_told_apart() -> None:
    assert len(set(BY_KIND.values())) == len(BY_KIND)


def test_axes_are_wide_enough_for_noise() -> None:
    assert wide_enough([1.0, 1.02], 0.2) == pytest.approx((0.91, 1.11))
    assert wide_enough([0.5, 2.0], 0.2) == (0.5, 2.0)
