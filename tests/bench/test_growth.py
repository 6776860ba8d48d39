"""The task `growth`: its samples, and that a leak or a new graph would be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.tables import rows_of
from helpers.tiny_pair import save_pair

from hf_specdec.bench.reports.tables import growth as growth_tables
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage.results import load
from hf_specdec.bench.tasks import growth


def made_up(memory: list[int], graphs: list[int]) -> dict[str, Any]:
    """Eight samples, 100 calls apart, in MiB."""
    samples = [
        {"method": "x", "calls": 100 * number, "resident_bytes": m * 2**20, "device_bytes": 0, "graphs": g}
        for number, (m, g) in enumerate(zip(memory, graphs, strict=True), start=1)
    ]
    return {"methods": [{"name": "x", "title": "x"}], "samples": samples}


def growth_of(memory: list[int], graphs: list[int]) -> tuple[str, str, str]:
    """Calls between which growth is counted, growth of the resident memory, and of the compiled graphs."""
    (shown,) = rows_of(growth_tables.growth_table(made_up(memory, graphs)))
    return shown["Calls"], shown["Resident (MiB)"], shown["Compiled graphs"]


def test_what_happens_before_things_settle_is_forgiven() -> None:
    assert growth_of([400, 500] + [500] * 6, [1, 3] + [3] * 6) == ("200 to 800", "+0.0", "+0")


def test_a_leak_is_seen() -> None:
    assert growth_of([400 + 2 * number for number in range(8)], [3] * 8) == ("200 to 800", "+12.0", "+0")


def test_a_new_graph_is_seen() -> None:
    assert growth_of([400] * 8, [3] * 7 + [4]) == ("200 to 800", "+0.0", "+1")


def test_compiled_graphs_are_counted() -> None:
    # This backend compiles nothing, but every graph that reaches it counts.
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.ones(2))
    before = growth.sample()["graphs"]
    double(torch.ones(2))
    assert growth.sample()["graphs"] == before
    double(torch.ones(3))
    assert growth.sample()["graphs"] == before + 1


def test_the_task_from_end_to_end(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    settings = Settings(
        task="growth", model_name=str(target), assistant_model=str(draft), assisted_generation=True, engines=("eager",),
        prompt_lengths=(20, 30), max_new_tokens=4, calls=30, output_dir=tmp_path,
    )  # fmt: skip
    growth.run_growth(settings)
    result = load(tmp_path / "growth-target-draft-greedy.json.gz")
    numbers = [item["calls"] for item in result["samples"]]
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 30, growth.SAMPLES)
    assert all(item["resident_bytes"] > 2**20 for item in result["samples"])
    assert (tmp_path / "growth-target-draft-greedy.md").read_text() == growth_tables.render(result)
