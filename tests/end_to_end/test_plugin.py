"""The plug-in: what `enable` changes, what it doesn't, and that undoing it leaves no trace."""

import copy
import gc
import inspect
import json
import pickle
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from helpers.models import EOS, PAD, Passes, llama, noisy, prompts
from helpers.patches import copy_wherever_possible, interpret_compiled_steps
from helpers.streamer import Streamer
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput

import hf_specdec
from hf_specdec import SpeculationStats, SpeculativeDecoding, last_speculation
from hf_specdec.config import FIELDS
from hf_specdec.models import recorded_passes
from hf_specdec.prepared import cuda_graphs

ORIGINAL = GenerationMixin.generate
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
TURNS = 300
SPECULATIVE = {"generation_strategy": "speculative"}


@pytest.fixture
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    target = llama()
    return target, noisy(target)


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    assert GenerationMixin.generate is ORIGINAL
    yield
    for _ in range(5):
        hf_specdec.disable()
    assert GenerationMixin.generate is ORIGINAL


def speculates(model: PreTrainedModel, **call: Any) -> SpeculationStats | None:
    """The statistics of one call if it speculated."""
    before = last_speculation(model)
    model.generate(**prompts(1), **{**GREEDY, **call})
    after = last_speculation(model)
    return after if after is not before else None


def test_disable_restores_the_very_original(pair) -> None:
    target, draft = pair
    attributes = set(vars(target))
    hf_specdec.enable(target, assistant_model=draft, generation_strategy="bild")
    assert GenerationMixin.generate is not ORIGINAL and speculates(target)
    hf_specdec.disable(target)
    assert GenerationMixin.generate is ORIGINAL and set(vars(target)) == attributes
    with pytest.raises((ValueError, TypeError), match="generation_strategy"):
        target.generate(**prompts(1), **GREEDY, **SPECULATIVE)


def test_enables_nest_as_a_stack(pair) -> None:
    target, draft = pair
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative", num_assistant_tokens=3):
        with hf_specdec.enable(num_assistant_tokens=1), hf_specdec.enable(target, generation_strategy="bild"):
            inner = speculates(target)
        outer = speculates(target)
    assert inner is not None and outer is not None
    assert (inner.strategy, max(max(r.drafted) for r in inner.rounds)) == ("bild", 1) or inner.drafted == 0
    assert (outer.strategy, max(max(r.drafted) for r in outer.rounds)) == ("speculative", 3)
    assert GenerationMixin.generate is ORIGINAL


def test_a_context_is_undone_by_an_exception_and_out_of_order(pair) -> None:
    with pytest.raises(RuntimeError), hf_specdec.enable():
        raise RuntimeError
    assert GenerationMixin.generate is ORIGINAL
    first, second = hf_specdec.enable(), hf_specdec.enable(pair[0])
    with first:
        pass
    assert GenerationMixin.generate is not ORIGINAL
    with second:
        pass
    assert GenerationMixin.generate is ORIGINAL
    hf_specdec.disable()
    assert GenerationMixin.generate is ORIGINAL


def test_a_wrapper_of_somebody_else_survives(pair, monkeypatch) -> None:
    """Another package that wraps `generate` after our import still gets its calls, during and after."""
    calls = []

    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        calls.append("wrapped")
        return ORIGINAL(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", wrapper)
        with hf_specdec.enable():
            assert speculates(pair[0], assistant_model=pair[1], **SPECULATIVE)
        assert calls == ["wrapped"] and GenerationMixin.generate is wrapper
    assert GenerationMixin.generate is ORIGINAL


def test_a_wrapper_put_on_top_of_ours_survives(pair) -> None:
    """It is not thrown away by `disable`, and a later `enable` does not run in circles with it."""
    try:
        with hf_specdec.enable():
            beneath = GenerationMixin.generate
            GenerationMixin.generate = lambda self, *args, **kwargs: beneath(self, *args, **kwargs)
            on_top = GenerationMixin.generate
        assert GenerationMixin.generate is on_top and speculates(pair[0]) is None
        with hf_specdec.enable():
            assert speculates(pair[0], assistant_model=pair[1], **SPECULATIVE)
        assert GenerationMixin.generate is on_top
    finally:
        GenerationMixin.generate = ORIGINAL


def test_enable_concerns_its_model_only_or_all(pair) -> None:
    target, draft = pair
    other = llama(seed=3)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        assert speculates(target) and not speculates(other)
        with pytest.raises((ValueError, TypeError), match="generation_strategy"):
            other.generate(**prompts(1), **GREEDY, **SPECULATIVE)
    with hf_specdec.enable(assistant_model=draft, generation_strategy="speculative"):
        assert speculates(target) and speculates(other)


def test_an_enabled_model_can_be_freed() -> None:
    """The handle holds it weakly, and a dead model's enable is undone with the next one."""
    target = llama()
    seen = ref(target)
    hf_specdec.enable(target, num_assistant_tokens=2)
    del target
    gc.collect()
    assert seen() is None
    with hf_specdec.enable():
        assert GenerationMixin.generate is not ORIGINAL


@pytest.mark.parametrize(("drafts", "how"), [
    ("a model", "recorded"), ("the target", "recorded"), ("a model", "compiled"), ("the target", "static"),
    ("a model", "auto"), ("a model", "hybrid"),
])  # fmt: skip
def test_a_draft_is_freed_with_its_target(drafts: str, how: str, monkeypatch) -> None:
    """Though `enable` was never undone, and its handle is still there."""
    monkeypatch.setattr(recorded_passes, "EAGER_PASSES", 1)
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: how == "static")
    interpret_compiled_steps(monkeypatch)
    settings: dict[str, dict[str, Any]] = {
        "recorded": {"num_assistant_tokens": 2},
        "compiled": {"num_assistant_tokens": 2, "compile": True},
        "static": {"num_assistant_tokens": 2, "cache_implementation": "static"},
        "auto": {"num_assistant_tokens": "auto"},
        "hybrid": {"drafter": "hybrid"},
    }
    target = llama(num_hidden_layers=1)
    draft = noisy(target) if drafts == "a model" else target
    handle = hf_specdec.enable(target, assistant_model=draft, **SPECULATIVE)
    for _ in range(2):
        target.generate(**prompts(1), **GREEDY, **settings[how])
    assert last_speculation(target).drafted
    left = [ref(part) for model in (target, draft) for part in (model, *model.parameters())]
    del target, draft
    gc.collect()
    assert not any(part() is not None for part in left)
    with handle:
        pass
    assert GenerationMixin.generate is ORIGINAL


def test_a_draft_is_freed_where_speculation_is_no_longer_enabled(pair) -> None:
    """By whoever still has the handle."""
    target, _ = pair
    draft = noisy(target)
    seen, handle = ref(draft), hf_specdec.enable(target, assistant_model=draft)
    hf_specdec.disable(target)
    del draft
    gc.collect()
    assert seen() is None and not handle.defaults


def test_threads_enable_at_the_same_time() -> None:
    """Neither fails, nor is the wrapper left behind; without the lock so many turns have dozens of failures."""

    def work() -> None:
        for _ in range(TURNS):
            with hf_specdec.enable(**SPECULATIVE):
                assert GenerationMixin.generate is not ORIGINAL

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work) for _ in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    assert GenerationMixin.generate is ORIGINAL


def longest(stats: SpeculationStats | None) -> int:
    return max(max(r.drafted) for r in stats.rounds)


def test_precedence_is_call_then_generation_config_then_enable(pair) -> None:
    """0 and False in a call are values, over a default of another value; the draft never reaches 0.99."""
    target, draft = pair
    with hf_specdec.enable(target, assistant_model=draft, num_assistant_tokens=2, fallback_threshold=0.99):
        assert longest(speculates(target, **SPECULATIVE)) == 2
        target.generation_config.num_assistant_tokens = 3
        assert longest(speculates(target, **SPECULATIVE)) == 3
        passed = {"generation_config": GenerationConfig(num_assistant_tokens=5, **GREEDY), **SPECULATIVE}
        assert longest(speculates(target, **passed)) == 5
        assert longest(speculates(target, **passed, num_assistant_tokens=1)) == 1
        target.generation_config.generation_strategy = "bild"
        by_config, by_call = speculates(target), speculates(target, **SPECULATIVE)
        assert by_config is not None and by_config.strategy == "bild" and longest(by_config) == 0
        assert by_call is not None and by_call.strategy == "speculative"
        assert longest(speculates(target, fallback_threshold=0.0)) > 0
        target.generation_config.token_healing = True
        with pytest.raises(ValueError, match="token_healing=True"):
            speculates(target)
        assert speculates(target, token_healing=False)


def test_a_draft_or_a_drafter_given_to_enable_is_used(pair) -> None:
    """Unless a strategy is named, or none; a draft given to a call alone is transformers' affair."""
    target, draft = pair
    with hf_specdec.enable(target, generation_strategy="bild"), hf_specdec.enable(target, assistant_model=draft):
        found = speculates(target)
        assert found is not None and found.strategy == "bild"
    for given in ({"assistant_model": draft}, {"drafter": "suffix"}):
        with hf_specdec.enable(target, **given):
            found = speculates(target)
            assert found is not None and found.strategy == "speculative"
            assert speculates(target, generation_strategy=None) is None
        with hf_specdec.enable(target, **given, generation_strategy=None):
            assert speculates(target) is None
    with hf_specdec.enable(target):
        assert speculates(target, assistant_model=draft) is None


def test_the_draft_s_own_settings_count_where_no_others_are_given(pair, monkeypatch) -> None:
    """As in transformers' assisted generation, which reads them there; copies are not drafted by the model."""
    target, draft = pair
    call = {"assistant_model": draft, **SPECULATIVE}
    copy_wherever_possible(monkeypatch)
    with hf_specdec.enable():
        assert longest(speculates(target, **call)) == 4
        draft.generation_config.num_assistant_tokens = 6
        assert longest(speculates(target, **call)) == 6
        assert longest(speculates(target, custom_generate=SpeculativeDecoding(draft))) == 6
        assert longest(speculates(target, **call, num_assistant_tokens=2)) == 2
        with hf_specdec.enable(num_assistant_tokens=3):
            assert longest(speculates(target, **call)) == 3
        copied = speculates(target, **call, drafter="suffix", eos_token_id=None, max_new_tokens=60)
        assert longest(copied) > 6
        draft.generation_config.assistant_confidence_threshold = 1.0
        assert longest(speculates(target, **call)) == 1, "the first unsure token ends a draft"
        assert longest(speculates(target, **call, assistant_confidence_threshold=0.0)) == 6
        assert longest(speculates(target, custom_generate=SpeculativeDecoding(draft))) == 1
        draft.generation_config.num_assistant_tokens = 0
        with pytest.raises(ValueError, match="num_assistant_tokens=0 is not a length"):
            speculates(target, **call)


def test_a_schedule_of_the_draft_that_is_not_followed_is_named(pair) -> None:
    target, draft = pair
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    call = {"assistant_model": draft, **SPECULATIVE}
    with hf_specdec.enable():
        with pytest.warns(UserWarning, match="num_assistant_tokens_schedule='heuristic' .*='auto'") as warned:
            speculates(target, **call)
        assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            speculates(target, **call, num_assistant_tokens=3)
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            speculates(target, **call)


def test_defaults_in_generation_config_survive_save_and_load(pair, tmp_path) -> None:
    """`enable` and its calls change nothing of what is saved."""
    target, draft = pair
    settings = {"generation_strategy": "bild", "fallback_threshold": 0.0, "num_assistant_tokens": 2}
    target.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, **settings)
    target.save_pretrained(tmp_path / "before")
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="bild", fallback_threshold=0.2):
        speculates(target)
        target.save_pretrained(tmp_path / "enabled")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "enabled" / path.name).read_bytes()
    loaded = type(target).from_pretrained(tmp_path / "before", dtype=torch.float64)
    with hf_specdec.enable():
        stats = speculates(loaded, assistant_model=draft)
    assert stats is not None and stats.strategy == "bild" and longest(stats) == 2


def test_none_opts_out(pair) -> None:
    target, draft = pair
    plain = target.generate(**prompts(1), **GREEDY)
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        with Passes(draft) as passes:
            assert speculates(target, generation_strategy=None) is None
            assert torch.equal(target.generate(**prompts(1), **GREEDY, generation_strategy=None), plain)
        assert passes.count == 0 and speculates(target)


def test_transformers_own_assisted_generation_is_as_if_the_package_were_not_there(pair) -> None:
    """Same tokens, as many passes of either model, whether nothing, defaults, or a stored strategy are in force."""
    target, draft = pair

    def run(**call: Any) -> tuple[list, int, int]:
        draft.generation_config.num_assistant_tokens = 4
        with Passes(target) as verified, Passes(draft) as drafted:
            output = target.generate(**prompts(1), **GREEDY, assistant_model=draft, **call)
        return output.tolist(), verified.count, drafted.count

    expected = run()
    assert last_speculation(target) is None
    with hf_specdec.enable():
        assert run() == expected
    with hf_specdec.enable(assistant_model=noisy(target, seed=5), generation_strategy="bild"):
        assert run(generation_strategy=None) == expected
    target.generation_config.generation_strategy = "bild"
    with hf_specdec.enable():
        assert run(generation_strategy=None) == expected
    assert last_speculation(target) is None and last_speculation(draft) is None


def test_the_hook_without_patching(pair) -> None:
    """`custom_generate`, its streamer bound: tokens of plain `generate`, the streamer fed and ended."""
    target, draft = pair
    streamer = Streamer()
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3, streamer=streamer)
    plain = target.generate(**prompts(1), **GREEDY)
    output = target.generate(**prompts(1), **GREEDY, custom_generate=decoding, streamer=streamer)
    assert torch.equal(output, plain)
    assert streamer.calls == [plain[:, :9].tolist(), *[[token] for token in plain[0, 9:].tolist()], "end"]
    assert decoding.stats is last_speculation(target) is not None


def test_settings_of_the_call_precede_those_of_the_hook(pair) -> None:
    target, draft = pair
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=6)
    assert longest(speculates(target, custom_generate=decoding)) == 6
    assert longest(speculates(target, custom_generate=decoding, num_assistant_tokens=2)) == 2
    assert longest(speculates(target, custom_generate=decoding, num_assistant_tokens=3, drafter="hybrid")) <= 3
    with hf_specdec.enable():
        assert longest(speculates(target, custom_generate=decoding, num_assistant_tokens=1)) == 1
    assert longest(speculates(target, custom_generate=decoding)) == 6
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        speculates(target, custom_generate=decoding, num_assistant_tokens=0)
    with pytest.raises(ValueError, match="assistant_model=None"):
        speculates(target, custom_generate=SpeculativeDecoding(drafter="suffix"), drafter="model")


def test_the_hook_takes_every_setting() -> None:
    parameters = inspect.signature(SpeculativeDecoding(drafter="none")).parameters
    assert set(FIELDS) <= set(parameters)


def test_statistics_are_data(pair) -> None:
    target, draft = pair
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3)
    output = target.generate(**prompts(2), **GREEDY, custom_generate=decoding, return_dict_in_generate=True)
    stats = output.speculation
    assert output["speculation"] is stats and isinstance(output, GenerateDecoderOnlyOutput)
    for twin in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
        assert twin["speculation"].to_dict() == stats.to_dict() and torch.equal(twin["sequences"], output.sequences)
    assert stats is decoding.stats is last_speculation(target)
    assert stats.new_tokens == int((output.sequences[:, 9:] != PAD).sum())
    assert all(a <= d for r in stats.rounds for a, d in zip(r.accepted, r.drafted, strict=True))
    assert json.loads(json.dumps(stats.to_dict()))["accepted"] == stats.accepted
    assert f"{stats.accepted} of {stats.drafted} drafted tokens accepted" in str(stats) and "\n" not in str(stats)
