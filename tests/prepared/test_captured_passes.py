"""Compiled and captured passes of general rounds: plain tokens and the usual drafts.

Compiled code is interpreted, and CUDA graphs are stood in for.
"""

import warnings
from typing import Any

import pytest
import torch
from helpers.captured_steps import StandIn, capture_steps
from helpers.eagle_drafts import draft_for
from helpers.identity import speculated
from helpers.models import llama, noisy
from helpers.own_drafters import (
    PAD,
    VOCABULARY,
    lend,
    llama_with_mtp,
    needs_own_drafters,
    target_and_block_draft,
    target_with_mtp,
    texts,
)
from helpers.patches import choose_in_turn, interpret_compiled_steps, noted, returned
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.drafting.own_drafter import OwnDrafter
from hf_specdec.models.static_runner import StaticRunner
from hf_specdec.prepared import cuda_graphs
from hf_specdec.prepared.prepared_passes import PreparedPasses

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
STATIC = {"cache_implementation": "static"}
OWN = [*(pytest.param(kind, marks=needs_own_drafters) for kind in ("mtp", "dflash")), "eagle3"]
ENGINES = {"captured": STATIC, "compiled and captured": {"compile": True}}
Asked = tuple[PreTrainedModel, dict[str, Any]]


@pytest.fixture
def captured(monkeypatch) -> list[StandIn]:
    """Lists what is captured. Automatic lengths include rounds without drafts, whose hidden states are read later."""
    interpret_compiled_steps(monkeypatch)
    choose_in_turn(monkeypatch, 4, 0, 0, 2)
    return capture_steps(monkeypatch)


@pytest.fixture
def asked(request, tmp_path, monkeypatch) -> Asked:
    """A target, and the arguments that ask for a drafter that reads its hidden states."""
    if request.param == "dflash":
        target, draft = target_and_block_draft()
        return target, {"assistant_model": draft, "speculation_type": "dflash"}
    if request.param == "mtp":
        return llama_with_mtp(monkeypatch), {"use_mtp": True}
    target = llama(vocab_size=VOCABULARY)
    return target, {"assistant_model": draft_for(tmp_path, target)}


def drafted(target: PreTrainedModel, rows: int, **settings: Any) -> tuple[list[Any], Any]:
    """A call's proposals, round by round, and its output, whose tokens are those of plain `generate`."""
    call = {**texts(rows), **GREEDY, "return_dict_in_generate": True}
    with pytest.MonkeyPatch.context() as patch:
        proposals = returned(patch, OwnDrafter, "propose")
        plain = target.generate(**call)
        out = speculated(target, None, **call, **{"num_assistant_tokens": "auto", **settings})
    assert torch.equal(out.sequences, plain.sequences)
    rows_of = ((row, count) for one in proposals for row, count in zip(one.tokens.tolist(), one.lengths, strict=True))
    return [row[:count] for row, count in rows_of], out


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asked", OWN, indirect=True)
def test_tokens_are_plain_ones_and_drafts_those_of_unprepared_passes(
    asked: Asked, engine: str, rows: int, captured: list[StandIn], monkeypatch
) -> None:
    """In the third call, all of the target's passes but the prompt's are prepared, and nothing is captured any more."""
    target, settings = asked
    unprepared = noted(monkeypatch, StaticRunner, "_unprepared")
    general, _ = drafted(target, rows, **settings)
    assert not captured
    for _ in range(3):
        before = len(captured), sum(one.replays for one in captured)
        unprepared.clear()
        made, out = drafted(target, rows, **settings, **ENGINES[engine])
        assert made == general
    assert any(made) and len(unprepared) == 1
    assert before[0] == len(captured) > 1
    assert sum(one.replays for one in captured) - before[1] == len(out.speculation.rounds) - 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("asked", OWN, indirect=True)
def test_the_targets_passes_compile(asked: Asked, rows: int, monkeypatch) -> None:
    """With the same proposals as without compiling: the drafter gets the same hidden states."""
    interpret_compiled_steps(monkeypatch)
    target, settings = asked
    settings |= {"num_assistant_tokens": 3}
    unprepared = noted(monkeypatch, StaticRunner, "_unprepared")
    general, _ = drafted(target, rows, **settings)
    for _ in range(2):
        unprepared.clear()
        made, _ = drafted(target, rows, **settings, compile=True)
        assert made == general
    assert any(made) and len(unprepared) == 1, "the prompt's pass alone is not compiled in the last call"


@needs_own_drafters
@pytest.mark.parametrize("asked", ["mtp"], indirect=True)
def test_control_kept_results_give_other_drafts(asked: Asked, captured: list[StandIn], monkeypatch) -> None:
    """The tokens stay plain ones: hidden states change drafts alone."""
    target, settings = asked
    make = PreparedPasses.__init__

    def keeping(self: PreparedPasses, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self._captures = False

    monkeypatch.setattr(PreparedPasses, "__init__", keeping)
    made = [drafted(target, 1, **settings, **STATIC)[0] for _ in range(3)]
    assert made[2] != drafted(target, 1, **settings)[0]


@needs_own_drafters
@pytest.mark.parametrize("asked", ["mtp"], indirect=True)
def test_control_new_tensors_are_found(asked: Asked, captured: list[StandIn], monkeypatch) -> None:
    target, settings = asked
    prepare = cuda_graphs.prepare

    def copying(*args: Any, **named: Any) -> Any:
        step = prepare(*args, **named)
        return lambda *given: step(*(one.clone() for one in given))

    monkeypatch.setattr(cuda_graphs, "prepare", copying)
    with pytest.raises(AssertionError, match="other tensors than captured"):
        drafted(target, 1, **settings, **STATIC)


def test_a_replay_spoils_the_results_of_later_graphs_in_its_pool() -> None:
    pool, given = [], torch.ones(2)
    first, second = (StandIn(lambda one, by=by: (one * by,), pool) for by in (2, 3))
    (kept,) = first(given)
    (later,) = second(given)
    assert (kept.tolist(), later.tolist()) == ([2, 2], [3, 3])
    given += 1
    first(given)
    assert kept.tolist() == [4, 4] and later.isnan().all()


PROCESSORS = {"repetition_penalty": 1.3, "min_new_tokens": 5}
OTHERS: dict[str, dict[str, Any]] = {
    "text": PROCESSORS,
    "no draft": {"drafter": "none", **PROCESSORS},
    "hybrid": {"drafter": "hybrid", **PROCESSORS},
    "careful": {"on_draft_error": "continue"},
    "scores": {"output_scores": True, "output_logits": True},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_other_calls_whose_passes_are_captured(settings: dict[str, Any], rows: int, captured, monkeypatch) -> None:
    target = llama(vocab_size=VOCABULARY)
    draft = noisy(target)
    of_both = {name: value for name, value in settings.items() if name.startswith(("output", *PROCESSORS))}
    call = {**texts(rows), **GREEDY, **of_both, "return_dict_in_generate": True}
    plain = target.generate(**call)
    given = {} if settings.get("drafter") == "none" else {"assistant_model": draft}
    for _ in range(2):
        before = sum(one.replays for one in captured)
        with hf_specdec.enable(target):
            out = target.generate(**{**call, **settings}, **given, **STATIC, generation_strategy="speculative")
        assert torch.equal(out.sequences, plain.sequences)
        for name in ("scores", "logits") if "output_scores" in settings else ():
            torch.testing.assert_close(torch.stack(getattr(out, name)), torch.stack(getattr(plain, name)))
    replays = sum(one.replays for one in captured) - before
    assert replays >= len(out.speculation.rounds) - 1


def going_without(target: PreTrainedModel, **settings: Any) -> list[str]:
    """What two calls tell of going without."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            drafted(target, 3, **settings)
    return [str(one.message) for one in told if "decoding goes on without" in str(one.message)]


@pytest.mark.parametrize("asked", OWN, indirect=True)
def test_where_a_capture_fails_the_call_goes_on(asked: Asked, captured: list[StandIn], monkeypatch) -> None:
    def fails(self: StandIn, *given: Any) -> None:
        raise RuntimeError("no graph today")

    target, settings = asked
    monkeypatch.setattr(StandIn, "_capture", fails)
    (told,) = going_without(target, **settings, **STATIC)
    assert told.startswith("CUDA graphs") and "no graph today" in told
    assert [one.split(":")[0] for one in going_without(target, **settings, compile=True)] == ["compile=True"]


@needs_own_drafters
def test_passes_that_depend_on_values_are_not_captured(captured: list[StandIn], monkeypatch) -> None:
    """As those of experts that are called one by one, each with its tokens."""
    target, layers = target_with_mtp("DeepseekV3ForCausalLM", 1)
    lend(monkeypatch, target, layers)
    (told,) = going_without(target, use_mtp=True, **STATIC)
    assert told.startswith("CUDA graphs") and not any(one.replays for one in captured)


@needs_own_drafters
@pytest.mark.parametrize("asked", ["mtp"], indirect=True)
def test_where_compiling_fails_passes_are_captured(asked: Asked, captured: list[StandIn], monkeypatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no space")

    target, settings = asked
    monkeypatch.setattr("hf_specdec.prepared.compiled_step._compile", fails)
    (told,) = going_without(target, **settings, compile=True)
    assert told.startswith("compile=True") and "no space" in told
    assert any(one.replays for one in captured)
