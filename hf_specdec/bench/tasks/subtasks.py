"""The task `subtasks`: every way of decoding on the same examples of every subtask."""

from __future__ import annotations

from hf_specdec.bench.figures.quality import scores
from hf_specdec.bench.inputs import questions
from hf_specdec.bench.models.loading import load_pair
from hf_specdec.bench.reports.tables import subtasks as subtasks_tables
from hf_specdec.bench.running.methods_by_task import of_subtasks
from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.transformers_methods import assisted_refusal
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import results, run_session
from hf_specdec.bench.tasks import collecting
from hf_specdec.bench.tasks.collecting import Contender


def run_subtasks(settings: Settings, shared: Processes) -> None:
    """Measures, writes JSON and markdown into `settings.output_dir`, prints the lines of each subtask.

    Raises `BenchError` for what the user can put right.
    """
    results.check_output(settings)
    dialogues = questions.dialogues(settings)
    pair = load_pair(settings)
    contenders = [Contender(method, pair) for method in of_subtasks(settings, pair)]
    result = collecting.collect(settings, contenders, dialogues, shared)
    if result is None:
        return
    if refusal := assisted_refusal(settings, pair):
        result["notes"].append(refusal)
    result["quality"] = scores(result)
    run_session.finish_briefly(result, settings, subtasks_tables.terminal)
