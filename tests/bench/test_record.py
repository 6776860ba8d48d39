"""The columns in which calls are kept: everything comes back, and what calls share is written once."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.made_up_results import random_result

from hf_specdec.bench.running.timed_call import Call
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.storage import results
from hf_specdec.bench.storage.columns import as_record, from_record, pack, rounded, unpack


def calls_with_texts(seed: int) -> list[Call]:
    return [replace(call, texts=[f"text of {len(call.tokens[0])}"]) for call in random_result(seed)["calls"]]


def test_calls_come_back_as_they_were() -> None:
    measured = [replace(call, position=n, again=n % 3) for n, call in enumerate(calls_with_texts(0))]
    calls = [from_record(json.loads(json.dumps(as_record(call)))) for call in measured]
    assert unpack(json.loads(json.dumps(pack(measured)))) == calls, "times rounded"
    for one, other in zip(measured, calls, strict=True):
        assert replace(other, seconds=0.0, first_seconds=0.0) == replace(one, seconds=0.0, first_seconds=0.0)
        assert (other.seconds, other.first_seconds) == pytest.approx((one.seconds, one.first_seconds), rel=1e-4)


def test_what_repeats_share_is_written_once() -> None:
    calls = [replace(call, tokens=[[call.prompt] * 50], texts=None) for call in calls_with_texts(1)]
    packed = pack(calls)
    assert len(packed["answers"]["tokens"]) == 6 and len(calls) == 6 * 3 * 3
    # A repeat that answers otherwise has an answer of its own, and can be told.
    calls[-1] = replace(calls[-1], tokens=[[7] * 50])
    packed = pack(calls)
    assert len(packed["answers"]["tokens"]) == 7
    same = [i for i, call in enumerate(calls) if (call.method, call.prompts) == (calls[-1].method, calls[-1].prompts)]
    assert len({tuple(packed["calls"]["answers"][i]) for i in same}) == 2


def test_numbers_keep_five_digits() -> None:
    assert rounded({"a": [1.23456789, 123456.789], "b": 7, "c": "x"}) == {"a": [1.2346, 123460.0], "b": 7, "c": "x"}


def test_a_result_is_the_same_bytes_each_time_and_is_read_back(tmp_path: Path) -> None:
    result = random_result(2) | {"format": results.FORMAT, "task": "benchmark"}
    data = results.to_bytes(result)
    assert data == results.to_bytes(result)
    path = tmp_path / "x.json.gz"
    path.write_bytes(data)
    assert results.to_bytes(results.load(path)) == data
    for content in (b"no gzip", gzip.compress(b"{}"), gzip.compress(b"not JSON"), data[:-20]):
        path.write_bytes(content)
        with pytest.raises(BenchError, match="damaged or no result of this version"):
            results.load(path)
    path.unlink()
    with pytest.raises(BenchError, match="can't be read"):
        results.load(path)


def test_files_carry_target_draft_and_data_set_in_their_names(tmp_path: Path) -> None:
    named = {
        "benchmark-target-draft-speculative-greedy": Settings(assisted_generation=True),
        "benchmark-target-plain-greedy": Settings(),
        "decode-opt-6.7b-opt-350m-bild-sampling": Settings(
            task="decode", model_name="opt-6.7b", assistant_model="facebook/opt-350m", assisted_generation=True,
            generation_strategy="bild", do_sample=True,
        ),
        "subtasks-target-draft-large-xsum-validation-greedy": Settings(
            task="subtasks", assistant_model="draft-large", assisted_generation=True, dataset="owner/xsum",
            split="validation",
        ),
        "sweep-target-embedded-train-greedy": Settings(task="sweep", assisted_generation=True, split="train"),
        "sweep-target-draft-draft-small-embedded-greedy": Settings(
            task="sweep", assisted_generation=True, draft_models=("draft", "draft-small")
        ),
        "engines-target-draft-greedy": Settings(task="engines", assisted_generation=True),
        "engines-target-draft-int8-greedy": Settings(task="engines", assisted_generation=True, precision="int8"),
        "engines-target-draft-bfloat16-greedy": Settings(task="engines", assisted_generation=True, dtype="bfloat16"),
        "engines-target-draft-int8-bfloat16-greedy": Settings(
            task="engines", assisted_generation=True, precision="int8", dtype="bfloat16"
        ),
        "engines-target-draft-draft_int8-greedy": Settings(
            task="engines", assisted_generation=True, draft_precision="int8"
        ),
        "engines-target-draft-int8-draft_int4-draft_bfloat16-greedy": Settings(
            task="engines", assisted_generation=True, precision="int8", draft_precision="int4", draft_dtype="bfloat16"
        ),
        "engines-target-draft-bfloat16-draft_float32-greedy": Settings(
            task="engines", assisted_generation=True, dtype="bfloat16", draft_dtype="float32"
        ),
    }  # fmt: skip
    assert {results.stem(settings): settings for settings in named.values()} == named
