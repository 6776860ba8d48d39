"""Any call decodes what plain `generate` decodes, token for token, or ends with a documented error of this package.

`make fuzz CASES=…` runs any number of random cases, and continues a run that was stopped. Failures are kept in
`.hypothesis` and tried first next time.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.cases import CASES, ENGINES, PROCESSORS, Case, StopsAt, cases, models
from helpers.families import VOCABULARY
from helpers.patches import interpret_compiled_steps, returned
from helpers.streamer import Streamer
from helpers.word_tokenizer import word_tokenizer
from hypothesis import HealthCheck, event, given, settings
from hypothesis.strategies import DataObject, data
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.prepared_rounds import PreparedRounds
from hf_specdec.rules.round_statistics import Round

PACKAGE = Path(hf_specdec.__file__).parent
RAN: Counter[str] = Counter()  # calls that ended well, by engine


@pytest.mark.timeout(0)
@pytest.mark.parametrize("wanted", ENGINES)
@given(data())
@settings(
    max_examples=-(-(CASES or 200) // len(ENGINES)),
    derandomize=not CASES,
    database=None if not CASES else settings().database,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
def test_output_is_that_of_plain_generate_or_an_error_of_ours(wanted: str, data: DataObject) -> None:
    check(data.draw(cases(wanted)))


def test_a_real_share_of_the_calls_runs_in_each_engine() -> None:
    """Of those above."""
    if CASES or not RAN:
        pytest.skip("says something of the fixed cases only")
    assert set(RAN) == set(ENGINES)
    assert all(calls > RAN.total() / 10 for calls in RAN.values()), RAN


def check(case: Case) -> None:
    """Decode plainly and speculatively, and compare output, scores and stream."""
    target, draft = models(case.family, case.draft, case.short_context, case.engine == "compiled")
    call = arguments(case, target)
    for inputs in case.inputs:
        compare(case, target, draft, call | tensors(inputs))


def compare(case: Case, target: PreTrainedModel, draft: PreTrainedModel, call: dict[str, Any]) -> None:
    """One of a case's calls."""
    expected = attempt(target, case, call)
    if isinstance(expected, Exception) and (case.default_device or not len(call["input_ids"])):
        event("plain generate fails, for want of rows or on a default device without memory")
        return
    tokenizers = {"tokenizer": word_tokenizer(VOCABULARY), "assistant_tokenizer": word_tokenizer(VOCABULARY, -1)}
    with engine(case.engine) as rounds, hf_specdec.enable(target, assistant_model=draft):
        found = attempt(target, case, {**call, **case.speculation, **(tokenizers if case.other_tokenizer else {})})
    if isinstance(found, Exception):
        event(f"error: {str(found)[:40]}")
        # A draft may fail as the target would, which is warned of.
        if isinstance(expected, Exception) and type(found) in (type(expected), UserWarning):
            return
        raised_in = Path(traceback.extract_tb(found.__traceback__)[-1].filename)
        assert isinstance(found, ValueError) and PACKAGE in raised_in.parents, f"{found!r} instead of {expected!r}"
        return
    assert not isinstance(expected, Exception), f"plain generate raises {expected!r}"
    ran = case.engine if rounds else "general"
    RAN[ran] += 1
    event(f"{case.speculation['drafter']}, {ran} rounds")
    for name in ("default_device", "other_tokenizer"):
        event(f"{name}: {getattr(case, name)}")
    for name, value in expected.items():
        assert found[name] == value, name


def tensors(inputs: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
    shape = (len(inputs["input_ids"]), -1 if inputs["input_ids"] else 5)
    return {name: torch.tensor(value, dtype=torch.long).reshape(shape) for name, value in inputs.items()}


def arguments(case: Case, target: PreTrainedModel) -> dict[str, Any]:
    """The arguments of all calls; the end of text is a token that plain decoding chooses in the first."""
    call = {**case.call, **PROCESSORS[case.processor], "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if case.stop_at is not None:
        call["stopping_criteria"] = [StopsAt(case.stop_at)]
    if case.end_at is not None:
        plain = attempt(target, case, call | tensors(case.inputs[0]))
        if not isinstance(plain, Exception) and plain["sequences"]:
            new_tokens = plain["sequences"][0][-case.new_tokens :]
            eos = new_tokens[min(case.end_at, len(new_tokens) - 1)]
            call |= {"eos_token_id": eos, "pad_token_id": eos if case.pad_is_eos else 0}
    return call


def attempt(target: Any, case: Case, call: dict[str, Any]) -> dict[str, Any] | Exception:
    """What a call returns, with its stream; or its exception."""
    streamer = Streamer() if case.streams else None
    call = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    torch.set_default_dtype(getattr(torch, case.default_dtype))
    torch.set_default_device(case.default_device)
    try:
        output = target.generate(**call, streamer=streamer)
    except Exception as error:
        return error
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    stream = streamer.calls if streamer else []
    if isinstance(output, torch.Tensor):
        return {"sequences": output.tolist(), "stream": stream}
    finished = [column.isfinite().all().item() for column in output.scores or ()]
    return {"sequences": output.sequences.tolist(), "stream": stream, "columns": len(finished)}


@contextmanager
def engine(name: str) -> Iterator[list[Round]]:
    """One of `ENGINES`; yields the prepared rounds that have run. Failures that would be warned of are errors."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoding goes on without, since preparing failed")
        warnings.filterwarnings("error", message=".*continues without drafts: (?!ValueError)")
        rounds = returned(patch, PreparedRounds, "make_round")
        if name == "captured":
            patch.setattr(cuda_graphs, "captures", lambda device: True)
        elif name == "interpreted":
            interpret_compiled_steps(patch)
        yield rounds
