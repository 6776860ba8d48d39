"""Rounds over static buffers: plain `generate`'s tokens, whether compiled, captured or just called.

Where nothing is compiled, `captures` says yes on a CPU, so that what a CUDA graph would capture runs eagerly.
Distributions are those of `end_to_end/test_output_distributions.py`.
"""

import pytest
import torch
from helpers.families import ROWS_FAMILIES, exact_dtype, pair, prompts, repetitive
from helpers.pairwise import pairwise
from helpers.patches import choose_in_turn, copy_wherever_possible, interpret_compiled_steps

import hf_specdec
from hf_specdec.lengths.auto_length import PREPARED_LENGTHS, AutoLength
from hf_specdec.prepared import compiled_step, cuda_graphs, engine, prepared_rounds
from hf_specdec.prepared.engine import Engine
from hf_specdec.prepared.engine_store import kept_engines
from hf_specdec.rules.round_statistics import Round

GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize("family", ROWS_FAMILIES)
def test_greedy_tokens_are_those_of_plain_generate(family: str, fast_rounds) -> None:
    for batch_size in (1, 4):
        target, draft = pair(family, dtype=exact_dtype(family, batch_size))
        inputs = prompts(batch_size)
        plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
        settings = {**inputs, **GREEDY, "assistant_model": draft, "cache_implementation": "static"}
        for lookahead in (1, 4):
            assert torch.equal(target.generate(**settings, num_assistant_tokens=lookahead), plain)
        assert torch.equal(target.generate(**settings, drafter="none"), plain)
        lossless = {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.2}
        assert torch.equal(target.generate(**settings, **lossless), plain)
    assert fast_rounds


def test_statistics_are_those_of_the_general_rounds(fast_rounds) -> None:
    target, draft = pair("llama")
    settings = {**prompts(4), **GREEDY, "assistant_model": draft, "return_dict_in_generate": True}
    # A threshold between the extremes: some of this pair's drafts stop at once, some never.
    stopped = {"generation_strategy": "speculative", "entropy_threshold": 0.2}
    relaxed = ({"generation_strategy": name} for name in ("bild", "lenient", "typical", "ensemble"))
    for strategy in ({"generation_strategy": "speculative"}, *relaxed, stopped):
        general, fast = (
            target.generate(**settings, **strategy, cache_implementation=kind).speculation.rounds
            for kind in ("dynamic", "static")
        )
        if strategy is stopped:
            assert {1, 4} <= {n for round_ in general for n in round_.drafted}
        for name in ("drafted", "accepted", "new_tokens"):
            assert [getattr(r, name) for r in general] == [getattr(r, name) for r in fast]
        for one, other in zip(general, fast, strict=True):
            assert one.overlap == pytest.approx(other.overlap, rel=1e-5)


@pytest.mark.parametrize("drafter", ["suffix", "hybrid", "auto"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_copies_are_part_of_prepared_rounds(batch_size: int, drafter: str, fast_rounds, monkeypatch) -> None:
    """Rounds of copies, of the model, and of both; what the draft has not read, it reads before it drafts again."""
    copy_wherever_possible(monkeypatch)
    choose_in_turn(monkeypatch, 4, 0, 2, 8)
    target, draft = pair("llama", noise=0.3)
    call = {**repetitive(batch_size), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**call, generation_strategy=None)
    call |= {"assistant_model": draft}
    for variant in ({}, {"entropy_threshold": 0.2}):
        call |= {"cache_implementation": "static", "return_dict_in_generate": True, "drafter": drafter, **variant}
        out = target.generate(**call)
        assert torch.equal(out.sequences, plain)
        rounds = out.speculation.rounds
        assert len(fast_rounds) >= len(rounds)
        assert any(r.accepted != (0,) * batch_size and not r.draft_steps for r in rounds), "copies alone"
        assert drafter == "suffix" or any(r.draft_steps and any(r.accepted) for r in rounds), "the model's drafts"


VARIANTS = [
    {},
    {"entropy_threshold": 0.2},
    {"assistant_confidence_threshold": 0.1},
    {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.1},
]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_auto_gives_plain_tokens_in_prepared_rounds(batch_size: int, fast_rounds, monkeypatch) -> None:
    """By the lengths that it finds itself; what would be compiled runs as it is."""
    monkeypatch.setattr(compiled_step, "supported", lambda: False)
    monkeypatch.setattr(compiled_step, "_compiled", lambda step, *about: step)
    monkeypatch.setattr(cuda_graphs, "prepare", lambda step, *about, **how: step)
    target, draft = pair("llama")
    settings = {**GREEDY, "assistant_model": draft, "num_assistant_tokens": "auto", "compile": True}
    for variant in VARIANTS:
        for length, seed in ((11, 10), (19, 3), (9, 4)):
            inputs = prompts(batch_size, length, seed)
            plain = target.generate(**inputs, **GREEDY, generation_strategy=None)
            fast_rounds.clear()
            out = target.generate(**inputs, **settings, **variant, return_dict_in_generate=True)
            assert torch.equal(out.sequences, plain)
            assert len(fast_rounds) == len(out.speculation.rounds)
            assert set(fast_rounds[0].engine.steps) <= set(PREPARED_LENGTHS)


@pytest.mark.parametrize(
    ("family", "variant", "ends", "looks"),
    pairwise(("llama", "mistral-sliding", "gpt2"), VARIANTS, ({}, {"eos_token_id": None}), (True, False)),
    ids=str,
)
def test_rounds_of_all_lengths_draft_what_the_general_ones_do(
    family: str, variant: dict, ends: dict, looks: bool, fast_rounds, monkeypatch
) -> None:
    """After rounds without drafts, ragged rows catch up: a cache that misses or mixes up tokens drafts others.

    Drafts that may stop come in bursts on a CPU; on an accelerator nothing looks at them in between.
    """
    if not looks:
        monkeypatch.setattr(engine, "burst_of", lambda lookahead: lookahead)
    choose_in_turn(monkeypatch, 4, 0, 0, 8, 1, 0, 0, 0, 16, 2, 2, 0)
    target, draft = pair(family, noise=0.05)
    settings = {"max_new_tokens": 48, "do_sample": False, "assistant_model": draft, "num_assistant_tokens": "auto"}
    for batch_size in (1, 4):
        call = {**prompts(batch_size), **settings, **variant, **ends, "return_dict_in_generate": True}
        general, fast = (target.generate(**call, cache_implementation=kind) for kind in ("dynamic", "static"))
        assert torch.equal(general.sequences, fast.sequences)
        for name in ("drafted", "accepted", "new_tokens"):
            one, other = ([getattr(r, name) for r in out.speculation.rounds] for out in (general, fast))
            assert one == other
        lengths = [r.draft_steps for r in fast.speculation.rounds]
        assert {0, 1, 4} <= set(lengths) and max(lengths) >= 8
        widths = [r.width for r in fast.speculation.rounds]
        assert widths == [11 + lengths[0], *(n + 1 for n in lengths[1:])]
        assert 0 < fast.speculation.acceptance_rate < 1
    assert len(fast_rounds) > 10


@pytest.mark.parametrize("batch_size", [1, 4])
def test_drafting_ends_with_the_burst_in_which_the_last_row_stops(batch_size: int, fast_rounds) -> None:
    target, draft = pair("llama", noise=0.05)
    call = {**prompts(batch_size), "max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    settings = {"assistant_model": draft, "num_assistant_tokens": 12, "entropy_threshold": 0.2}
    plain = target.generate(**call, generation_strategy=None).sequences
    out = target.generate(**call, **settings, cache_implementation="static")
    assert torch.equal(out.sequences, plain)
    steps = [r.draft_steps for r in out.speculation.rounds[:-1]]
    assert steps == [4 * -(-max(r.drafted) // 4) for r in out.speculation.rounds[:-1]]
    assert len(set(steps)) > 1


@pytest.mark.parametrize("batch_size", [1, 4])
def test_compiled_bursts_draft_what_the_general_rounds_do(batch_size: int, enabled, monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    target, draft = pair("llama", noise=0.05)
    call = {**prompts(batch_size), "max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}
    call |= {"generation_strategy": "speculative", "num_assistant_tokens": 12, "entropy_threshold": 0.2}
    general, compiled = (target.generate(**call, assistant_model=draft, compile=compile) for compile in (False, True))
    assert torch.equal(general.sequences, compiled.sequences)
    for name in ("drafted", "accepted", "new_tokens"):
        one, other = ([getattr(r, name) for r in out.speculation.rounds] for out in (general, compiled))
        assert one == other
    steps = {r.draft_steps for r in compiled.speculation.rounds}
    assert {4, 8} <= steps, "drafts of one burst and of several"


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_target_as_its_own_draft_is_accepted_at_all_lengths(
    batch_size: int, first: int, fast_rounds, monkeypatch
) -> None:
    """Also where it reads its prompt late, and where a row ends long before the others' drafts catch up."""
    choose_in_turn(monkeypatch, *[0] * 20, 8, 2, 0, 4, first=first)
    target, _ = pair("llama")
    inputs, settings = prompts(batch_size, 8), {"max_new_tokens": 60, "do_sample": False}
    free = target.generate(**inputs, **settings, eos_token_id=None, generation_strategy=None)
    settings["eos_token_id"] = int(free[-1, 12])
    plain = target.generate(**inputs, **settings, generation_strategy=None)
    out = target.generate(
        **inputs, **settings, assistant_model=target, num_assistant_tokens="auto", cache_implementation="static",
        return_dict_in_generate=True,
    )  # fmt: skip
    rounds = out.speculation.rounds
    assert torch.equal(out.sequences, plain) and all(r.accepted == r.drafted for r in rounds)
    if batch_size > 1:
        assert {0, 2, 4, 8} <= {r.draft_steps for r in rounds}
        assert any(r.new_tokens[-1] == 0 and r.catch_up_seconds > 0 for r in rounds)


def test_only_what_is_unread_is_caught_up_with(fast_rounds, monkeypatch) -> None:
    """Its time is told apart; a draft step reads the last two tokens by itself."""
    choose_in_turn(monkeypatch, 4, 4, 0, 2, 0, 0, 2)
    target, draft = pair("llama", noise=0.0)
    settings = {**GREEDY, "max_new_tokens": 21, "eos_token_id": None, "return_dict_in_generate": True}
    out = target.generate(
        **prompts(1), **settings, assistant_model=draft, num_assistant_tokens="auto", cache_implementation="static"
    )
    # Each of these drafts is accepted, and its last token not read.
    rounds = [(r.draft_steps, r.catch_up_seconds > 0) for r in out.speculation.rounds]
    assert rounds == [
        (1, True), (4, False), (4, False), (0, False), (2, True), (0, False), (0, False), (2, True),
    ]  # fmt: skip
    assert all(r.catch_up_seconds <= r.draft_seconds for r in out.speculation.rounds)
    settled = [r.settled for r in out.speculation.rounds]
    assert settled == [False, False, True, False, False, True, True, True], "each length is prepared in its first round"


@pytest.mark.parametrize("drafter", ["model", "none"])
def test_sampled_texts_do_not_depend_on_the_default_dtype(drafter: str, fast_rounds) -> None:
    """In bfloat16 there are 256 uniform numbers: the rarest tokens would never be drawn."""
    target, draft = pair("llama")
    settings = {"do_sample": True, "max_new_tokens": 24, "eos_token_id": None, "cache_implementation": "static"}
    texts = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(3)
            texts.append(target.generate(**prompts(4), **settings, assistant_model=draft, drafter=drafter))
            assert fast_rounds[-1].engine.uniforms.dtype == torch.float32
        finally:
            torch.set_default_dtype(torch.float32)
            hf_specdec.release()
    assert torch.equal(*texts)


def test_under_autocast_the_general_rounds_serve(fast_rounds) -> None:
    """Steps would hold autocast's own casts of the weights, which go stale and are freed with it."""
    target, draft = pair("llama", dtype=torch.float32)
    settings = {**GREEDY, "assistant_model": draft, "cache_implementation": "static"}
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            target.generate(**prompts(2), **settings)
        assert bool(fast_rounds) != enabled


def test_where_no_drafting_length_is_ready_auto_decodes_plainly() -> None:
    """Until a draft seems to gain more than preparing it must."""
    lengths = AutoLength()
    lengths.use_prepared(lambda length: length == 0)
    lengths.limit, lengths._rests = 0, True
    for _ in range(20):
        lengths.observe(Round((0,), (0,), (1,), (0.0,), 0, 1, 0.0, 1.0, 1.0))
        assert lengths.limit == 0


def test_a_second_attempt_that_is_interrupted_leaves_no_steps(fast_rounds, monkeypatch) -> None:
    errors = iter([NameError("a module"), KeyboardInterrupt()])

    def failing(self: Engine, lookahead: int) -> None:
        self.steps[lookahead] = None
        raise next(errors)

    monkeypatch.setattr(Engine, "prepare", failing)
    monkeypatch.setattr(prepared_rounds, "settle", lambda: None)
    target, draft = pair("llama")
    with pytest.raises(KeyboardInterrupt):
        target.generate(**prompts(2), **GREEDY, assistant_model=draft, cache_implementation="static")
    (engine,) = kept_engines(target, compile=False)
    assert not engine.steps
