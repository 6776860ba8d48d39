"""Questions with their references: of the embedded corpus, of Spec-Bench, or of any data set that `datasets` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec import embedded
from hf_specdec.bench.settings import BenchError, Settings

# What Spec-Bench takes from MT-Bench and reports as one subtask.
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
_JSON_LINES = (".jsonl", ".ndjson")
OWN = "own"  # the prompts that a target writes itself, see `aligning.own_prompts`


@dataclass(frozen=True)
class Question:
    """One user turn to be answered.

    Args:
        index: number among all turns of the data set; sampling seeds derive from it.
        subtask: under which name it is reported.
        turns: the user's turns up to this one, which is the last.
        references: right answers to the last turn, if any are known.
        earlier: the indexes of the questions whose answers stand between the turns.
    """

    index: int
    subtask: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    earlier: tuple[int, ...] = ()


def dialogues(settings: Settings) -> list[list[Question]]:
    """The data set that `settings` name, as dialogues of one or more turns; `limit` of each subtask.

    Raises:
        BenchError: a data set that can't be read or has nothing in it, a malformed line, a missing column.
    """
    name = settings.dataset
    if settings.dataset_path is not None and not is_spec_bench(name):
        raise BenchError(
            f"--dataset_path: {str(settings.dataset_path)!r} is only read by --dataset spec_bench; give that too, or "
            "name the file by --dataset itself"
        )
    for option in ("prompt_column", "answer_column", "reference_column", "prompt_template"):
        value = getattr(settings, option)
        if value not in (None, "{prompt}") and (is_embedded(name) or is_spec_bench(name)):
            raise BenchError(
                f"--{option}: {value!r} can't be had from {name}, whose prompts are read in one way; leave it out, or "
                "name another data set by --dataset"
            )
    split = split_of(settings)
    if settings.split is not None and split is None:
        raise BenchError(f"--split: {settings.split!r} can't be had from a file, which is read whole; leave it out")
    if is_embedded(name):
        raw = _embedded(embedded_subtasks(name), str(split), settings.limit or settings.embedded_limit)
    elif is_spec_bench(name):
        if settings.dataset_path is None:
            raise BenchError(f"--dataset: {name!r} needs the place of its question.jsonl; give it by --dataset_path")
        raw = _one_subtask(list(_spec_bench(settings.dataset_path)), name)
    else:
        raw = _columns(settings)
    found: list[list[Question]] = []
    taken: dict[str, int] = {}
    index = 0
    for subtask, turns, references in raw:
        taken[subtask] = taken.get(subtask, 0) + 1
        if settings.limit is None or taken[subtask] <= settings.limit:
            numbers = range(index, index + len(turns))
            found.append(
                [
                    Question(number, subtask, turns[: k + 1], references[k], tuple(numbers[:k]))
                    for k, number in enumerate(numbers)
                ]
            )
        # Counted whether taken or not, so that a question has the same number under every limit.
        index += len(turns)
    if not found:
        raise BenchError(f"--dataset: {str(settings.dataset_path or name)!r} has no question in it; give another one")
    return found


def split_of(settings: Settings) -> str | None:
    """The split of the data set that is read; None if it has no splits."""
    if is_spec_bench(settings.dataset) or settings.dataset == OWN or _is_file(settings.dataset):
        return None
    return settings.split or ("heldout" if is_embedded(settings.dataset) else "test")


def is_embedded(name: str) -> bool:
    """Whether a data set is the embedded corpus, `embedded`, or one subtask of it, `embedded:SUBTASK`."""
    return name.partition(":")[0] == "embedded"


def is_spec_bench(name: str) -> bool:
    """Whether a data set is Spec-Bench, `spec_bench`, or one subtask of it, `spec_bench:SUBTASK`."""
    return name.partition(":")[0] == "spec_bench"


def embedded_subtasks(name: str) -> tuple[str, ...]:
    """The subtasks of the embedded corpus that a data set names; raises `BenchError` for an unknown one."""
    subtask = name.partition(":")[2]
    if subtask and subtask not in embedded.SUBTASKS:
        raise BenchError(
            f"--dataset: {subtask!r} is no subtask of the embedded data; give one of {', '.join(embedded.SUBTASKS)}"
        )
    return (subtask,) if subtask else embedded.SUBTASKS


def _is_file(name: str) -> bool:
    return name.endswith(_JSON_LINES) or Path(name).is_file()


Raw = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]


def _embedded(subtasks: tuple[str, ...], split: str, limit: int) -> Iterator[Raw]:
    if split not in embedded.SPLITS:
        raise BenchError(f"--split: {split!r} is none of the embedded data set's: {', '.join(embedded.SPLITS)}")
    for subtask in subtasks:
        for example in embedded.examples(subtask, split=split, n=limit):
            yield subtask, example.turns, tuple((reference,) for reference in example.references)


def _spec_bench(path: Path) -> Iterator[Raw]:
    for number, item in json_lines(path, "--dataset_path"):
        category, turns = item.get("category"), item.get("turns")
        # A text would pass for a list of its letters.
        turns = turns if isinstance(turns, list) else []
        if not isinstance(category, str) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise malformed(path, number, "it needs a category and a list of turns")
        references = item.get("reference") or []
        if not isinstance(references, list):
            raise malformed(path, number, "its reference is no list with an entry for each turn")
        # One a turn; where a single turn has several right answers they stand in a list of their own.
        per_turn = [_texts(references[k]) if k < len(references) else () for k in range(len(turns))]
        # In one line, since it names rows of tables.
        yield "multi-turn" if category in _MT_BENCH else " ".join(category.split()), tuple(turns), tuple(per_turn)


def _one_subtask(found: list[Raw], name: str) -> Iterator[Raw]:
    """Those of the subtask that a data set names, if it names one."""
    subtask, known = name.partition(":")[2], list(dict.fromkeys(subtask for subtask, *_ in found))
    if subtask and subtask not in known:
        raise BenchError(f"--dataset: {subtask!r} is no subtask of these questions; give one of {', '.join(known)}")
    return (one for one in found if subtask in ("", one[0]))


def _columns(settings: Settings) -> Iterator[Raw]:
    name = settings.dataset
    for number, row in rows(settings):
        text = cell(row, settings, "prompt_column", number)
        if not isinstance(text, str) or not text.strip():
            raise malformed(name, number, f"its {settings.prompt_column!r} is no text")
        references: tuple[str, ...] = ()
        if settings.reference_column is not None:
            references = _texts(cell(row, settings, "reference_column", number))
        yield (Path(name).name, (settings.prompt_template.replace("{prompt}", text),), (references,))


def rows(settings: Settings) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The rows of a data set that `settings` name by its columns, with their numbers from 1; errors as `dialogues`."""
    name = settings.dataset
    if settings.prompt_column is None:
        raise BenchError(f"--prompt_column: not given; name the column of {name!r} that holds the prompts")
    return json_lines(Path(name), "--dataset") if name.endswith(_JSON_LINES) else enumerate(_load(settings), start=1)


def _load(settings: Settings) -> Iterable[Mapping[str, Any]]:
    """A data set of the hub, a folder, or a file that `datasets` knows by its ending."""
    # Here because it takes seconds.
    import datasets

    name, _, config = settings.dataset.partition(":")
    path = Path(name)
    split = split_of(settings)
    datasets.disable_progress_bars()
    # Its own line on what it can't read would precede ours.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if path.is_file():
            kind = {".csv": "csv", ".tsv": "csv", ".json": "json", ".parquet": "parquet"}.get(path.suffix, "text")
            options = {"sep": "\t"} if path.suffix == ".tsv" else {}
            return datasets.load_dataset(kind, data_files=str(path), split="train", **options)
        return _from_hub(name, config, str(split))
    # `datasets` raises many kinds for what is missing, damaged, private or unreachable; all mean one thing.
    except Exception as error:
        # What it says itself may only be that something went wrong.
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
        of_split = "" if split is None else f" with --split {split!r}"
        raise BenchError(
            f"--dataset: {settings.dataset!r}{of_split} can't be loaded ({lines[0].rstrip('.')}); give embedded, "
            "spec_bench, a local file, or a name that the hub has and this machine can reach"
        ) from error


def _from_hub(name: str, config: str, split: str) -> Iterable[Mapping[str, Any]]:
    """A data set's split. Of one that needs a loading script, which `datasets` no longer runs, the hub's Parquet copy.

    The hub keeps such copies on the branch refs/convert/parquet, as CONFIG/SPLIT/*.parquet.
    """
    import datasets

    try:
        return datasets.load_dataset(name, config or None, split=split)
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
    files = f"hf://datasets/{name}@refs/convert/parquet/{config or 'default'}/{split}/*.parquet"
    return datasets.load_dataset("parquet", data_files=files, split="train")


def json_lines(path: Path, argument: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSON lines file with the numbers of their lines, from 1; blank lines are skipped.

    Args:
        argument: the one that named the file, for errors.

    Raises:
        BenchError: the file can't be read, or a line is no JSON object.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(
            f"{argument}: {str(path)!r} can't be read ({error.strerror}); give a file that exists and is readable"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            json.dumps(item, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise malformed(path, number, "it holds half a surrogate pair, which UTF-8 cannot hold") from error
        except ValueError as error:
            raise malformed(path, number, "it is not JSON") from error
        except RecursionError as error:
            raise malformed(path, number, "it is nested too deeply") from error
        if not isinstance(item, dict):
            raise malformed(path, number, "it is not a JSON object")
        yield number, item


def cell(row: Mapping[str, Any], settings: Settings, argument: str, number: int) -> Any:
    """The value of the column that an argument names; dots lead into nested columns, as in translation.de.

    Raises:
        BenchError: the row, of this number, has no such column.
    """
    column = getattr(settings, argument)
    value: Any = row
    for key in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise BenchError(
                f"--{argument}: {column!r} is not in row {number}, which has {', '.join(sorted(row))}; name one of "
                "these"
            )
        value = value[key]
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """A reference, or a list of them, without empty ones."""
    if value is None:
        return ()
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(text) for text in listed if str(text).strip())


def malformed(path: Path | str, number: int, why: str) -> BenchError:
    """The error of a line that can't be read."""
    return BenchError(f"--dataset: line {number} of {str(path)!r} is malformed: {why}; correct or remove it")
