"""One sitting of a run that may take several: it begins with what is in the journal, and ends with the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import environment, results
from hf_specdec.bench.storage.journal import Journal, Record, discard

Key = tuple[Any, ...]


def key_of(record: Record) -> Key:
    """What a record is about: there is one of each."""
    if record["kind"] == "run":
        return run_key(record["repeat"], record["prompt"], record["method"])
    if record["kind"] == "prompt":
        return "prompt", record["index"]
    return forwards_key(record["repeat"], record["prompt"], record["draft"])


class RunSession:
    """The journal of one process, open, with its records by what they are about.

    Args:
        settings, shared: of the run.
        key: what a record is about; of several about one thing the last counts.

    Raises:
        BenchError: the output folder can't be used, or holds an unfinished run with other arguments.
    """

    def __init__(self, settings: Settings, shared: Processes, key: Callable[[Record], Key] = key_of) -> None:
        results.check_writable(settings.output_dir)
        arguments = settings.to_dict()
        del arguments["output_dir"]
        self.journal = Journal(settings.output_dir, results.stem(settings), arguments, shared.rank)
        # None writes before all have read.
        shared.wait()
        self._environment = environment.describe()
        self.journal.begin(environment=self._environment)
        self._key = key
        self.done: dict[Key, Record] = {key(record): record for record in self.journal.records}

    def keep(self, record: Record) -> None:
        """Puts a record on the disk."""
        self.journal.append(record)
        self.done[self._key(record)] = record

    def conclude(self, result: dict[str, Any]) -> None:
        """Gives the result the environment in which measuring began; a restart in another one is said."""
        self.journal.close()
        assert self.journal.header is not None
        before, now = self.journal.header["environment"], self._environment
        for name in ("cpu", "gpus", "packages", "torch_threads", "commit"):
            if before[name] != now[name]:
                result["notes"].append(
                    f"Measured in several sittings that differ in {name} ({before[name]}, then {now[name]}): "
                    "times can't be compared safely."
                )
        result["environment"] = {**before, "load_average_at_end": environment.load_average()}


def run_key(repeat: int, prompt: int, method: str) -> Key:
    return "run", repeat, prompt, method


def forwards_key(repeat: int, prompt: int, draft: str | None) -> Key:
    return "forwards", repeat, prompt, draft


def without_kind(record: Record) -> dict[str, Any]:
    """A record as results hold it: by its place they know its kind."""
    return {key: value for key, value in record.items() if key != "kind"}


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Saves the result and its rendering; the journal has then done its work."""
    results.save(result, settings)
    discard(settings.output_dir, results.stem(settings))
