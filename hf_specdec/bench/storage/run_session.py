"""A run's records, saved as they are measured; an interrupted run starts with those in the journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hf_specdec.bench.running.processes import Processes
from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.running.warming import ColdStart
from hf_specdec.bench.settings import Settings
from hf_specdec.bench.storage import environment, results
from hf_specdec.bench.storage.columns import as_record, from_record, rounded
from hf_specdec.bench.storage.journal import Journal, Record, discard

Key = tuple[Any, ...]

# What a record of each kind is about: there is one of each.
_KEYS = {
    "call": ("method", "prompts", "repeat"),
    "prompt": ("index",),
    "passes": ("engine", "draft", "prompts", "repeat"),
    "cold": ("method", "batch", "length"),
    "readings": ("method", "prompts", "repeat"),
}


def key_of(record: Record) -> Key:
    """What a record is about."""
    kind = record["kind"]
    values = (record[name] for name in _KEYS[kind])
    return (kind, *(tuple(value) if isinstance(value, list) else value for value in values))


def call_key(method: str, prompts: tuple[int, ...], repeat: int) -> Key:
    return "call", method, prompts, repeat


def passes_key(engine: str, draft: str | None, prompts: tuple[int, ...], repeat: int) -> Key:
    return "passes", engine, draft, prompts, repeat


class RunSession:
    """The journal of a run, open, with its records by what they are about.

    Args:
        settings, shared: of the run.

    Raises:
        BenchError: the output folder can't be used, or holds a run of this name with other arguments.
    """

    def __init__(self, settings: Settings, shared: Processes) -> None:
        results.check_output(settings)
        arguments = settings.to_dict()
        del arguments["output_dir"]
        self.journal = Journal(settings.output_dir, results.stem(settings), arguments)
        # None writes before all have read.
        shared.wait()
        self._environment = environment.describe()
        self._processes = shared.count
        self.journal.begin(environment=self._environment, processes=shared.count)
        self.records: dict[Key, Record] = {key_of(record): record for record in self.journal.records}

    def keep(self, kind: str, record: Record) -> None:
        """Puts a record on the disk; its floats are rounded."""
        whole = {"kind": kind, **rounded(record)}
        self.journal.append(whole)
        self.records[key_of(whole)] = whole

    def keep_call(self, call: Call) -> None:
        """Puts a call on the disk."""
        self.keep("call", as_record(call))

    def keep_cold(self, cold: ColdStart) -> None:
        """Puts a method's warm-up on the disk; that of an earlier start stands."""
        number = sum(record["kind"] == "cold" for record in self.records.values())
        record = asdict(cold) | {"number": number}
        if key_of({"kind": "cold", **record}) not in self.records:
            self.keep("cold", record)

    def call(self, method: str, prompts: tuple[int, ...], repeat: int) -> Call:
        """A call that has been measured."""
        return from_record(self.records[call_key(method, prompts, repeat)])

    def has_call(self, method: str, prompts: tuple[int, ...], repeat: int) -> bool:
        """Whether it was measured."""
        return call_key(method, prompts, repeat) in self.records

    def conclude(self, result: dict[str, Any], records: list[Record] | None = None) -> None:
        """Puts all records into the result, in an order that doesn't depend on who measured when.

        The environment is that in which measuring began; a restart in another one is noted.

        Args:
            records: those of all processes; by default this one's.
        """
        self.journal.close()
        listed = list(self.records.values()) if records is None else records
        order = {method["name"]: number for number, method in enumerate(result["methods"])}
        calls = [from_record(record) for record in listed if record["kind"] == "call"]
        result["calls"] = sorted(calls, key=lambda call: (call.repeat, call.batch, call.prompts, order[call.method]))
        for key in ("passes", "cold", "readings"):
            same = [record for record in listed if record["kind"] == key]
            same.sort(key=lambda record: (record.get("number", 0), str(key_of(record))))
            result[key] = [_without_kind(record) for record in same]
        prompts = [_without_kind(record) for record in listed if record["kind"] == "prompt"]
        if prompts:
            result["prompts"] = sorted(prompts, key=lambda prompt: int(prompt["index"]))
        before, now = self.journal.header["environment"], self._environment
        for name in ("cpu", "instructions", "gpus", "packages", "torch_threads", "commit"):
            earlier = before.get(name)  # None where an earlier version began that did not note it
            if earlier != now[name]:
                result["notes"].append(
                    f"Measured in several starts that differ in {name} ({earlier}, then {now[name]}): "
                    "times can't be compared safely."
                )
        begun = self.journal.header["processes"]
        if begun != self._processes:
            result["notes"].append(
                f"Begun with {begun} parallel processes and finished with {self._processes}: each had another share of "
                "the processor, so times can't be compared safely."
            )
        result["environment"] = {**before, "busy_cores_at_end": environment.busy_cores()}


def _without_kind(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "kind"}


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Saves the result and its rendering, and deletes the journal."""
    results.save(result, settings)
    discard(settings.output_dir, results.stem(settings))


def finish_briefly(result: dict[str, Any], settings: Settings, summary: Callable[[dict[str, Any]], str]) -> None:
    """`finish`; prints a summary, and where the report is, which is too long for a terminal."""
    finish(result, settings)
    print(f"{summary(result)}Full report: {settings.output_dir / results.stem(settings)}.md")
