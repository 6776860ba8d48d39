"""Recorded passes equal the model's own to the last bit at every text length; models that need Python have none."""

import gc
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import MethodType

import pytest
import torch
from helpers.families import FAMILIES, pair, prompts
from helpers.identity import speculated
from helpers.memory import resident
from helpers.models import llama, noisy
from helpers.patches import noted
from torch.overrides import BaseTorchFunctionMode
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec.models import jit_traces, recorded_passes
from hf_specdec.models.fingerprint import state_of
from hf_specdec.models.recorded_passes import MAX_RECORDINGS, RecordedStep, recordable
from hf_specdec.prepared.freed_memory import return_freed_memory

SETTINGS = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """Recordings are made at once; one entry for every replay."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    return noted(monkeypatch, recorded_passes, "replay", lambda *_: 1)


def _speculate(target, draft, rows: int = 1, **settings):
    return speculated(target, draft, **prompts(rows), **{**SETTINGS, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_are_the_model_s_own_to_the_bit(family: str, replays: list[int], monkeypatch) -> None:
    """In float32, so that a single operation in another order would show; lookaheads make passes of many widths."""
    target, draft = pair(family, dtype=torch.float32)
    recorded = family not in ("bloom", "t5", "mt5", "bart")
    # (rows, lookahead)
    half = [(1, 7), (4, 4)] if list(FAMILIES).index(family) % 2 and recorded else [(4, 7), (1, 4)][: 1 + recorded]
    with monkeypatch.context() as unrecorded:
        unrecorded.setattr(recorded_passes, "EAGER_PASSES", 10**9)
        asked = [_speculate(target, draft, rows, num_assistant_tokens=n) for rows, n in half]
    assert not replays
    found = [_speculate(target, draft, rows, num_assistant_tokens=n) for rows, n in half for _ in range(2)]
    assert bool(replays) == recorded
    for one, two, reference in zip(found[::2], found[1::2], asked, strict=True):
        for out in (one, two):
            assert torch.equal(out.sequences, reference.sequences)
            # Rows that have ended are unspecified.
            assert all(torch.equal(a[0], b[0]) for a, b in zip(out.logits[:9], reference.logits[:9], strict=True))


def test_rounds_are_settled_once_their_passes_are_replayed(replays: list[int]) -> None:
    """Three passes record and verify; the prompt's pass, and those of a second call, take their usual time."""
    target = llama()
    with hf_specdec.enable(target, generation_strategy="speculative", drafter="none"):
        inputs = prompts(1, length=17)  # below 32 slots, where passes would be verified again
        calls = [target.generate(**inputs, **{**SETTINGS, "max_new_tokens": 14}).speculation.rounds for _ in range(2)]
    assert [one.settled for one in calls[0]] == [True] + 3 * [False] + (len(calls[0]) - 4) * [True]
    assert all(one.settled for one in calls[1])


def test_few_recordings_serve_all_widths_and_lengths(replays: list[int], monkeypatch) -> None:
    made = noted(monkeypatch, torch._C, "_create_graph_by_tracing")
    target, draft = pair("llama")
    for lookahead in (1, 2, 5, 8):
        for length in (7, 12):
            inputs = prompts(1, length=length)
            speculated(target, draft, **inputs, max_new_tokens=30, do_sample=False, num_assistant_tokens=lookahead)
    assert (
        replays and len(made) <= 2 * 2 * 2
    )  # one token and several, for target and draft, each with a layer of its own


def test_weights_that_change_in_place_are_seen(replays: list[int]) -> None:
    target, draft = pair("llama")
    _speculate(target, draft)
    seen = len(replays)
    with torch.no_grad():
        for weight in target.parameters():
            weight += 0.3 * torch.randn_like(weight)
    out = _speculate(target, draft)
    assert len(replays) > seen
    assert torch.equal(out.sequences, target.generate(**prompts(1), **SETTINGS).sequences)


def test_hooks_and_replaced_methods_are_called_in_every_pass(replays: list[int]) -> None:
    target, draft = pair("llama")
    _speculate(target, draft)
    seen, calls = len(replays), []
    hook = target.model.layers[1].register_forward_hook(lambda *_: calls.append("hook"))
    rounds = len(_speculate(target, draft).speculation.rounds)
    hook.remove()
    assert len(calls) == rounds
    mlp = target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = MethodType(lambda self, x: (calls.append("forward"), forward(x))[1], mlp)
    rounds = len(_speculate(target, draft).speculation.rounds)
    assert calls.count("forward") == rounds
    assert not recordable(target) and len(replays) > seen  # the draft's go on being recorded


def _by_index(found: torch.Tensor) -> torch.Tensor:
    row, position = (found.sum(dim=-1) > 0).nonzero(as_tuple=True)
    return found.index_put((row, position), -found[row, position])


def _by_branch(found: torch.Tensor) -> torch.Tensor:
    return torch.cat([-token if token.sum() > 0 else token for token in found.unbind(1)]).view_as(found)


def _by_list(found: torch.Tensor) -> torch.Tensor:
    signs = [[-1.0 if total > 0 else 1.0 for total in row] for row in found.sum(dim=-1).tolist()]
    return found * torch.tensor(signs, dtype=found.dtype).unsqueeze(2)


@pytest.mark.parametrize("route", [_by_index, _by_branch, _by_list])
def test_a_model_that_asks_for_values_is_left_alone(route: Callable, replays: list[int]) -> None:
    """Its way depends on the text: what one pass has recorded would be wrong in another."""

    class Routing(torch.nn.Module):
        def __init__(self, mlp: torch.nn.Module) -> None:
            super().__init__()
            self.mlp = mlp

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return route(self.mlp(states))

    Routing.__module__ = "transformers.of_a_test"  # others are left alone unseen
    target = llama()
    draft = noisy(target)
    target.model.layers[0].mlp = Routing(target.model.layers[0].mlp).eval()
    rows = {"input_ids": torch.arange(2, 11).unsqueeze(0), "max_new_tokens": 40, "do_sample": False}
    assert recordable(target)
    plain = target.generate(**rows)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        for _ in range(3):
            assert torch.equal(target.generate(**rows, num_assistant_tokens=1), plain)
    kept = recorded_passes._known.all_of(target).values()
    assert kept and not any(passes.of(1)._recordings for passes in kept)


@pytest.mark.parametrize("by", ["position", "mask"])
def test_what_is_picked_by_position_is_recorded_and_by_a_mask_is_not(by: str) -> None:
    """torch marks both alike, as an operation whose result may have any shape; GPT-J picks its angles by position."""
    table = torch.arange(8.0)
    chosen = torch.tensor([1, 6]) if by == "position" else table > 5
    passes = RecordedStep()
    for _ in range(recorded_passes.EAGER_PASSES + 2):
        assert torch.equal(passes.run(lambda x, at: x[at], [table, chosen], span=1), table[chosen])
    assert bool(passes.made) == (by == "position")


def test_a_step_that_python_changes_is_never_replayed() -> None:
    """The negative control of the trials: a recording that does not do what the step does is found out."""
    count = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return x + count[0]

    passes = RecordedStep()
    found = [passes.run(step, [torch.zeros(2)], 1)[0].item() for _ in range(60)]
    assert found == sorted(set(found)), "each call gives another number"
    assert len(passes._recordings) == MAX_RECORDINGS


@pytest.mark.parametrize("change", ["attribute", "activation", "class method", "function", "buffer", "dropout"])
def test_changes_between_calls_are_seen(change: str, replays: list[int], monkeypatch) -> None:
    """Also of what is no weight: a recording holds for the code and the attributes that it was made with."""
    target, draft = pair("llama")
    for _ in range(2):
        _speculate(target, draft)
    seen, layer = len(replays), target.model.layers[0]
    if change == "attribute":
        layer.self_attn.scaling *= 3
    elif change == "activation":
        layer.mlp.act_fn = torch.nn.Tanh().eval()
    elif change == "class method":
        monkeypatch.setattr(type(layer.mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    elif change == "function":
        monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    elif change == "buffer":
        target.register_buffer("of_the_user_s", torch.zeros(3))
    else:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(1.0)).train()
    for _ in range(2):
        out = _speculate(target, draft)
        assert torch.equal(out.sequences, target.generate(**prompts(1), **SETTINGS).sequences)
    assert len(replays) > seen and recordable(target) == (change != "dropout")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_left_alone(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    assert not recordable(llama(rope_parameters=scaling))


def test_a_choice_by_the_length_of_the_text_is_found_out(replays: list[int]) -> None:
    """Shapes prove themselves anew where the text has doubled."""
    passes = RecordedStep()

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + (1 if mask.shape[0] > 100 else 0)

    def at(span: int) -> float:
        return passes.run(step, [torch.zeros(1), torch.zeros(span)], span)[0].item()

    assert [at(span) for span in range(40, 60)] == [0.0] * 20 and replays
    assert [at(span) for span in range(130, 150)] == [1.0] * 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory the process takes")
def test_a_process_that_serves_model_after_model_takes_no_more_memory(replays: list[int]) -> None:
    """A recording that stayed would take two megabytes."""

    def serve(models: int) -> int:
        for seed in range(models):
            target = llama(seed)
            speculated(target, noisy(target), **prompts(1), max_new_tokens=12, do_sample=False, num_assistant_tokens=2)
        gc.collect()
        return_freed_memory()
        return resident()

    before = serve(2)
    seen = len(replays)
    assert serve(6) < before + 5e6 and len(replays) > seen


def test_a_model_in_training_under_autocast_or_a_function_mode_is_left_alone() -> None:
    target, _ = pair("llama")
    assert recordable(target) and not recordable(target.train())
    target.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not recordable(target)
    with BaseTorchFunctionMode():
        assert not recordable(target)


def test_an_edited_configuration_is_seen(replays: list[int]) -> None:
    """Models read some of its values in every pass."""
    target, draft = pair("gemma2")
    settings = {"eos_token_id": None}
    for _ in range(2):
        _speculate(target, draft, **settings)
    assert replays
    state = state_of(target)
    target.config.attn_logit_softcapping = 0.5
    assert state_of(target) != state
    for _ in range(2):
        out = _speculate(target, draft, **settings)
    plain = target.generate(**prompts(1), **{**SETTINGS, **settings})
    assert torch.equal(out.sequences, plain.sequences)
    assert torch.allclose(torch.cat(out.logits), torch.cat(plain.logits))


def test_without_torchscript_nothing_is_replayed(replays: list[int]) -> None:
    """`PYTORCH_JIT=0`: tracing returns the step itself, which writes into the first call's cache."""
    target, draft = pair("llama")
    torch.jit._state.disable()
    try:
        plain = target.generate(**prompts(1), **SETTINGS).sequences
        for _ in range(4):
            assert torch.equal(_speculate(target, draft).sequences, plain)
    finally:
        torch.jit._state.enable()
    assert not replays


def test_a_trace_is_freed_with_the_last_reference_to_it() -> None:
    """Of those that it calls, too."""

    def constant() -> tuple[torch.Tensor, Callable[[], int]]:
        """A tensor that the trace of a function holds, and the count of those who hold it."""
        tensor = torch.ones(2)
        return tensor, tensor._use_count

    one, holders_of_one = constant()
    calls = [jit_traces.traced(lambda x: x + one, [torch.zeros(2)])]
    outer = jit_traces.traced(lambda x: jit_traces.replay(calls[0], [x]) * 2, [torch.zeros(2)], calls)
    calls.clear()
    assert outer is not None and holders_of_one() > 1
    assert jit_traces.replay(outer, [torch.ones(2)]).tolist() == [4.0, 4.0]
    del outer
    gc.collect()
    assert holders_of_one() == 1


def test_without_what_tracing_takes_passes_run_as_they_are(monkeypatch) -> None:
    target, _ = pair("llama")
    assert recordable(target)
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    assert not recordable(target) and jit_traces.traced(torch.neg, [torch.ones(2)]) is None


def test_tracing_hides_no_warning_of_another_thread() -> None:
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("while tracing", UserWarning, stacklevel=1)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(warnings.warn, "elsewhere", UserWarning).result()
        return x + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert jit_traces.traced(step, [torch.zeros(2)]) is not None
        seen = [str(warning.message) for warning in caught]
    assert "elsewhere" in seen
    assert not any("tracing" in text or "deprecated" in text for text in seen)


def test_threads_record_and_replay_the_same_model(replays: list[int]) -> None:
    target, draft = pair("llama")
    plain = target.generate(**prompts(1), **SETTINGS).sequences
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(target.generate, **prompts(1), **SETTINGS) for _ in range(8)]
        assert all(torch.equal(call.result().sequences, plain) for call in calls)
    assert replays
