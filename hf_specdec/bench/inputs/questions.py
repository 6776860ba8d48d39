"""Questions with references: from the embedded corpus, Spec-Bench, or any data set that `datasets` reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec import embedded
from hf_specdec.bench.settings import BenchError, Settings

# The MT-Bench categories, which Spec-Bench reports as one subtask.
_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
_JSON_LINES = (".jsonl", ".ndjson")
OWN = "own"  # the prompts that a target writes itself, see `aligning.own_prompts`


@dataclass(frozen=True)
class Question:
    """One user turn to be answered.

    Args:
        index: number among all turns of the data set; sampling seeds derive from it.
        subtask: the name in reports.
        turns: the user's turns up to and including this one.
        references: known right answers to the last turn.
        earlier: the indexes of the questions that hold the dialogue's earlier turns.
    """

    index: int
    subtask: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    earlier: tuple[int, ...] = ()


def dialogues(settings: Settings) -> list[list[Question]]:
    """Read the data set that `settings` name as dialogues of one or more turns, up to `limit` per subtask.

    Raises:
        BenchError: an unreadable or empty data set, a malformed line, a missing column.
    """
    name = settings.dataset
    if settings.dataset_path is not None and not is_spec_bench(name):
        raise BenchError(
            f"--dataset_path: {str(settings.dataset_path)!r} is only read by --dataset spec_bench; give that too, or "
            "give the file as --dataset"
        )
    for option in ("prompt_column", "answer_column", "reference_column", "prompt_template"):
        value = getattr(settings, option)
        if value not in (None, "{prompt}") and (is_embedded(name) or is_spec_bench(name)):
            raise BenchError(
                f"--{option}: {value!r} does not apply to {name}, whose format is fixed; leave it out, or give another "
                "data set with --dataset"
            )
    split = split_of(settings)
    if settings.split is not None and split is None:
        raise BenchError(f"--split: {settings.split!r} does not apply to a file, which has no splits; leave it out")
    if is_embedded(name):
        raw = _embedded(embedded_subtasks(name), str(split), settings.limit or settings.embedded_limit)
    elif is_spec_bench(name):
        if settings.dataset_path is None:
            raise BenchError(f"--dataset: {name!r} needs the path of its question.jsonl; give --dataset_path")
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
        # Counted even if skipped, so that a question has the same number under every limit.
        index += len(turns)
    if not found:
        raise BenchError(f"--dataset: {str(settings.dataset_path or name)!r} has no questions; give another one")
    return found


def split_of(settings: Settings) -> str | None:
    """The split of the data set to read; None if it has no splits."""
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
            f"--dataset: {subtask!r} is not a subtask of the embedded data; give one of {', '.join(embedded.SUBTASKS)}"
        )
    return (subtask,) if subtask else embedded.SUBTASKS


def _is_file(name: str) -> bool:
    return name.endswith(_JSON_LINES) or Path(name).is_file()


Raw = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]]


def _embedded(subtasks: tuple[str, ...], split: str, limit: int) -> Iterator[Raw]:
    if split not in embedded.SPLITS:
        raise BenchError(f"--split: {split!r} must be a split of the embedded data: {', '.join(embedded.SPLITS)}")
    for subtask in subtasks:
        for example in embedded.examples(subtask, split=split, n=limit):
            yield subtask, example.turns, tuple((reference,) for reference in example.references)


def _spec_bench(path: Path) -> Iterator[Raw]:
    for number, item in json_lines(path, "--dataset_path"):
        category, turns = item.get("category"), item.get("turns")
        # A string would pass for a list of its letters.
        turns = turns if isinstance(turns, list) else []
        if not isinstance(category, str) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise malformed(path, number, "it needs a category and a list of turns")
        references = item.get("reference") or []
        if not isinstance(references, list):
            raise malformed(path, number, "its reference is not a list with an entry for each turn")
        # One entry per turn; a turn with several right answers has a list of them.
        per_turn = [_texts(references[k]) if k < len(references) else () for k in range(len(turns))]
        # On one line, since it names rows of tables.
        yield "multi-turn" if category in _MT_BENCH else " ".join(category.split()), tuple(turns), tuple(per_turn)


def _one_subtask(found: list[Raw], name: str) -> Iterator[Raw]:
    """The questions of the subtask in a data set's name; all without one."""
    subtask, known = name.partition(":")[2], list(dict.fromkeys(subtask for subtask, *_ in found))
    if subtask and subtask not in known:
        raise BenchError(f"--dataset: {subtask!r} is not a subtask of these questions; give one of {', '.join(known)}")
    return (one for one in found if subtask in ("", one[0]))


def _columns(settings: Settings) -> Iterator[Raw]:
    name = settings.dataset
    for number, row in rows(settings):
        text = cell(row, settings, "prompt_column", number)
        if not isinstance(text, str) or not text.strip():
            raise malformed(name, number, f"its {settings.prompt_column!r} is not a text")
        references: tuple[str, ...] = ()
        if settings.reference_column is not None:
            references = _texts(cell(row, settings, "reference_column", number))
        yield (Path(name).name, (settings.prompt_template.replace("{prompt}", text),), (references,))


def rows(settings: Settings) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a data set that is read by columns, with their numbers from 1; errors as in `dialogues`."""
    name = settings.dataset
    if settings.prompt_column is None:
        raise BenchError(f"--prompt_column: not given; name the column of {name!r} that holds the prompts")
    return json_lines(Path(name), "--dataset") if name.endswith(_JSON_LINES) else enumerate(_load(settings), start=1)


def _load(settings: Settings) -> Iterable[Mapping[str, Any]]:
    """Load a data set from the hub, a folder, or a file whose suffix `datasets` knows."""
    # Imported here since it takes seconds.
    import datasets

    name, _, config = settings.dataset.partition(":")
    path = Path(name)
    split = split_of(settings)
    datasets.disable_progress_bars()
    # Silences its own message about unreadable data, which would precede ours.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if path.is_file():
            kind = {".csv": "csv", ".tsv": "csv", ".json": "json", ".parquet": "parquet"}.get(path.suffix, "text")
            options = {"sep": "\t"} if path.suffix == ".tsv" else {}
            return datasets.load_dataset(kind, data_files=str(path), split="train", **options)
        return _from_hub(name, config, str(split))
    # `datasets` raises many kinds of errors (missing, damaged, private, unreachable); all mean: cannot be loaded.
    except Exception as error:
        # Its own message may only say that something went wrong.
        cause = error.__cause__ or error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
        of_split = "" if split is None else f" with --split {split!r}"
        raise BenchError(
            f"--dataset: {settings.dataset!r}{of_split} can't be loaded ({lines[0].rstrip('.')}); give embedded, "
            "spec_bench, a local file, or the name of a data set on the hub that this machine can reach"
        ) from error


def _from_hub(name: str, config: str, split: str) -> Iterable[Mapping[str, Any]]:
    """Load a split; for a data set with a loading script, which `datasets` no longer runs, the hub's Parquet copy.

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
    """Yield the objects of a JSON lines file with their line numbers from 1; blank lines are skipped.

    Args:
        argument: the argument that named the file, for messages.

    Raises:
        BenchError: the file can't be read, or a line is not a JSON object.
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
    """The value of the column that an argument names; dots address nested columns, such as translation.de.

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
    """The non-empty texts of a reference or a list of references."""
    if value is None:
        return ()
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(text) for text in listed if str(text).strip())


def malformed(path: Path | str, number: int, why: str) -> BenchError:
    """The error for a malformed line."""
    return BenchError(f"--dataset: line {number} of {str(path)!r} is malformed: {why}; correct or remove it")
