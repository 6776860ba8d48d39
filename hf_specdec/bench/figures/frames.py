"""The calls of a result as a frame with one row per call, and figures of what their rounds drafted and accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from hf_specdec.bench.figures.bootstrap import ENOUGH
from hf_specdec.bench.records import Asked, Call, Interval, Method, Result

if TYPE_CHECKING:
    import pandas as pd

_ADDED = ("indexes", "question", "label", "batch", "length", "decode_tokens", "decode_seconds")


@dataclass(frozen=True)
class Part:
    """Some calls of a result."""

    result: Result
    calls: pd.DataFrame

    @property
    def methods(self) -> list[Method]:
        """The methods that were called, in the result's order."""
        called = set(self.calls["method"])
        return [method for method in self.result.methods if method.name in called]

    @property
    def batch_sizes(self) -> list[int]:
        """Ascending."""
        return sorted(map(int, self.calls["batch"].unique()))

    @property
    def labels(self) -> list[str]:
        """The subtasks, in the order of the data."""
        present = set(self.calls["label"])
        return list(dict.fromkeys(one.label for one in self.result.prompts if one.label in present))

    def of(self, *methods: str) -> pd.DataFrame:
        """The frame of these methods' calls."""
        return self.calls[self.calls["method"].isin(methods)]

    def where(self, **values: Any) -> Part:
        """The part whose calls have these values in these columns; None means any."""
        calls = self.calls
        for column, value in values.items():
            calls = calls if value is None else calls[calls[column] == value]
        return Part(self.result, calls)


def whole(result: Result) -> Part:
    """All calls of a result."""
    return Part(result, frame(result.calls, result.prompts))


def frame(calls: Sequence[Call], prompts: Sequence[Asked]) -> pd.DataFrame:
    """A frame with one row per call.

    Columns: the fields of `Call`, with `prompts` as a text that identifies the batch, and `indexes` of the rows'
    prompts; `question`, shared by the turns of a dialogue and the lengths of an example; `label`, `batch`, and
    `length` of the longest prompt; `decode_tokens` and `decode_seconds` after the first delivery (one token per row in
    plain decoding, otherwise the tokens of the first round). Both are 0 if nothing came after it.
    """
    import pandas as pd  # imported here, since measuring doesn't need it

    asked = {one.index: one for one in prompts}
    rows = []
    for call in calls:
        batch = [asked[index] for index in call.prompts]
        after = max(0, call.new_tokens - call.first_tokens)
        rows.append(
            {
                **vars(call),
                "indexes": call.prompts,
                "prompts": ",".join(map(str, call.prompts)),
                "question": ",".join(str(one.question) for one in batch),
                "label": batch[0].label,
                "batch": len(batch),
                "length": max(one.tokens for one in batch),
                "decode_tokens": after,
                "decode_seconds": call.seconds - call.first_seconds if after else 0.0,
            }
        )
    return pd.DataFrame(rows, columns=[*(one.name for one in fields(Call)), *_ADDED])


def examples(calls: pd.DataFrame) -> int:
    """The number of different examples."""
    return int(calls["question"].nunique())


def acceptance_rate(calls: pd.DataFrame) -> float | None:
    """Accepted drafted tokens / drafted tokens; None if nothing was drafted."""
    return quotient(calls["accepted"].sum(), calls["drafted"].sum())


def tokens_per_round(calls: pd.DataFrame) -> float | None:
    """τ: new tokens / target verification passes, the target's own token included; None for plain generate()."""
    drafting = calls[calls["rounds"] > 0]
    return quotient(drafting["new_tokens"].sum(), drafting["row_rounds"].sum())


def alpha(calls: pd.DataFrame) -> float | None:
    """α (Leviathan et al. 2023): mean over the drafted positions reached of the overlap of both distributions.

    A round reaches its accepted positions and the first rejected one. None if nothing was drafted, and for methods
    that don't report the overlap (transformers' own in sampling).
    """
    drafting = calls[calls["rounds"] > 0]
    if drafting["overlap"].isna().any():
        return None
    return quotient(drafting["overlap"].sum(), sum(map(sum, drafting["reached"])))


def waiting(calls: pd.DataFrame) -> float | None:
    """Share of row-rounds in which an ended row waited for the rest of its batch; None without rounds."""
    share = quotient(calls["row_rounds"].sum(), (calls["rounds"] * calls["batch"]).sum())
    return None if share is None else 1 - share


def time_per_round(calls: pd.DataFrame) -> dict[str, float] | None:
    """Mean seconds of a round's `draft`, `verify` and `overhead` (the rest), and mean `draft_steps`.

    Excludes each call's first round, which reads the prompt. None if the method does not report times.
    """
    told = calls[calls["round_seconds"].notna() & (calls["rounds"] > 1)]
    count = int((told["rounds"] - 1).sum())
    if not count:
        return None
    draft, verify, spent = (float(told[f"{part}_seconds"].sum()) / count for part in ("draft", "verify", "round"))
    steps = sum(number * times for row in told["steps"] for number, times in enumerate(row)) / count
    return {"draft": draft, "verify": verify, "overhead": spent - draft - verify, "draft_steps": steps}


def acceptance_by_position(calls: pd.DataFrame) -> list[tuple[int, Interval]]:
    """For each draft position, how many rounds reached it, and the share accepted there with Wilson's interval.

    Calls that decoded the same count once: repeats, or the same example at another length.
    """
    from scipy.stats import binomtest  # imported here since it takes a second

    distinct = calls.drop_duplicates(["question", "outputs"])
    found = []
    for reached, accepted in zip(
        _summed(distinct["reached"]), _summed(distinct["kept"], distinct["reached"]), strict=True
    ):
        ends = binomtest(accepted, reached).proportion_ci(method="wilson")
        known = (float(ends.low), float(ends.high)) if examples(distinct) >= ENOUGH else (None, None)
        found.append((reached, Interval(accepted / reached, *known)))
    return found


def _summed(rows: Any, as_long_as: Any = ()) -> list[int]:
    """Element-wise sums of rows of different lengths."""
    longest = max(map(len, [*rows, *as_long_as]), default=0)
    return [sum(row[place] for row in rows if place < len(row)) for place in range(longest)]


def quotient(above: float, below: float) -> float | None:
    """`above / below`, or None if `below` is 0."""
    return float(above / below) if below and not math.isnan(below) else None
