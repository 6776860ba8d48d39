"""Methods, their order and what each leaves behind; prompts and names."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import families
from helpers.made_up_results import frame_of
from helpers.tiny_pair import CONTEXT, VOCABULARY, save_pair
from helpers.word_tokenizer import word_tokenizer

from hf_specdec import SpeculationStats, embedded, last_speculation
from hf_specdec.bench.figures.frames import acceptance_rate
from hf_specdec.bench.inputs import prompts
from hf_specdec.bench.inputs.prompts import benchmark_prompts, decode_prompts
from hf_specdec.bench.inputs.questions import Question, dialogues
from hf_specdec.bench.models import names
from hf_specdec.bench.models.loading import LoadedPair, load_pair
from hf_specdec.bench.models.names import KNOWN_PAIRS, default_draft, full_name
from hf_specdec.bench.running.measuring import batches_of, in_turn
from hf_specdec.bench.running.methods import chosen_keywords, fixed_lookahead, lookahead, ours, plain
from hf_specdec.bench.running.rounds import summary
from hf_specdec.bench.running.timed_call import TimingStreamer, timed_call
from hf_specdec.bench.running.transformers_methods import (
    SCHEDULES,
    assisted,
    assisted_refusal,
    can_ensemble,
    ensemble,
    prompt_lookup,
)
from hf_specdec.bench.settings import BenchError, Settings
from hf_specdec.bench.tasks.benchmark import compared
from hf_specdec.rules.round_statistics import Round


def settings_for(folder: Path, encoder_decoder: bool = False) -> Settings:
    target, draft = save_pair(folder, encoder_decoder)
    return Settings(model_name=str(target), assistant_model=str(draft), assisted_generation=True, max_new_tokens=7)


METHODS = ["plain", "none recorded", "assisted", "assisted confidence 0.4", "speculative"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Settings:
    return settings_for(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pair(settings: Settings) -> LoadedPair:
    return load_pair(settings)


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> tuple[Settings, LoadedPair]:
    settings = settings_for(tmp_path_factory.mktemp("t5"), encoder_decoder=True)
    return settings, load_pair(settings)


def test_prompts_have_exactly_the_lengths_asked_for(pair: LoadedPair, t5: tuple[Settings, LoadedPair]) -> None:
    for loaded in (pair, t5[1]):
        prompts = benchmark_prompts(loaded, (33, 90), 3, new_tokens=5)
        assert [len(prompt.token_ids) for prompt in prompts] == [33] * 3 + [90] * 3
        assert [prompt.index for prompt in prompts] == list(range(6))
        assert len({prompt.token_ids for prompt in prompts}) == 6


def test_chat_template_goes_around_the_text(pair: LoadedPair, monkeypatch) -> None:
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(pair.tokenizer, "chat_template", template)
    (prompt,) = benchmark_prompts(pair, (100,), 1, new_tokens=5)
    text = "".join(pair.tokenizer.convert_ids_to_tokens(list(prompt.token_ids)))
    assert len(prompt.token_ids) == 100 and text.startswith("[") and text.endswith("]>")


def test_lengths_that_do_not_fit_are_refused(pair: LoadedPair) -> None:
    message = rf"--prompt_lengths: {CONTEXT - 4} tokens and --max_new_tokens 5 .* {CONTEXT} tokens"
    with pytest.raises(BenchError, match=message):
        benchmark_prompts(pair, (CONTEXT - 4,), 1, new_tokens=5)
    benchmark_prompts(pair, (CONTEXT - 5,), 1, new_tokens=5)


def test_decode_prompts_are_cut_on_the_left_and_that_is_said(pair: LoadedPair) -> None:
    text = "word " * 300
    (prompt,), notes = decode_prompts(pair, [text], new_tokens=10)
    assert list(prompt.token_ids) == pair.tokenizer(text).input_ids[-(CONTEXT - 10) :]
    assert len(notes) == 1 and "cut on the left" in notes[0]
    built_in, _ = decode_prompts(pair, [], new_tokens=10)
    assert [prompt.label for prompt in built_in] == list(embedded.SUBTASKS)


def test_questions_are_cut_behind_the_first_token_if_it_is_bos(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "_dialogue", lambda *given: [1, *range(10, 20)])
    question = Question(0, "qa", ("?",))
    for bos, room, kept in ((1, 4, [1, 17, 18, 19]), (1, 1, [19]), (None, 4, [16, 17, 18, 19])):
        monkeypatch.setattr(prompts, "_room", lambda *given, room=room: room)
        pair: Any = SimpleNamespace(tokenizer=SimpleNamespace(bos_token_id=bos), extractor=None)
        prompt, cut = prompts.question_prompt(pair, question, (), 5)
        assert (list(prompt.token_ids), cut) == (kept, 11 - room)


def test_questions_have_the_same_numbers_under_every_limit(tmp_path) -> None:
    path = tmp_path / "question.jsonl"
    subjects = [("qa", 2), ("qa", 1), ("summary", 3), ("qa", 1), ("summary", 1)]
    lines = [json.dumps({"category": name, "turns": ["?"] * turns}) for name, turns in subjects]
    path.write_text("\n".join(lines))
    for limit, numbers in ((None, [[0, 1], [2], [3, 4, 5], [6], [7]]), (1, [[0, 1], [3, 4, 5]])):
        settings = Settings(dataset="spec_bench", dataset_path=path, limit=limit)
        assert [[question.index for question in dialogue] for dialogue in dialogues(settings)] == numbers


def test_the_first_round_counts_to_no_round_s_time() -> None:
    """It reads the prompt."""
    times = ((5.0, 6.0, 12.0), (0.1, 0.2, 0.4), (0.3, 0.4, 0.8))
    stats = SpeculationStats("speculative", [Round((2,), (1,), (2,), (1.0,), 2, 3, *each) for each in times])
    spent = summary(stats.rounds, times=True)
    assert (spent.draft_seconds, spent.verify_seconds, spent.round_seconds) == pytest.approx((0.4, 0.6, 1.2))


def test_every_method_counts_the_same_tokens(settings, pair, t5) -> None:
    for asked, loaded in ((settings, pair), t5):
        (prompt,) = benchmark_prompts(loaded, (40,), 1, asked.max_new_tokens)
        calls = {method.name: timed_call(method, [prompt], asked) for method in compared(asked, loaded)}
        assert list(calls) == METHODS
        for call in calls.values():
            assert call.tokens == calls["plain"].tokens and 0 < call.first_seconds <= call.seconds
            assert call.new_tokens == len(call.tokens[0]) and call.first_tokens >= 1
            if call.rounds:  # each has a token of the target's own, unless the text ended in it
                assert call.accepted <= call.new_tokens <= call.accepted + call.rounds


def test_bild_runs_with_its_thresholds(settings: Settings, pair: LoadedPair) -> None:
    method = ours("bild", chosen_keywords(replace(settings, fallback_threshold=0.0), pair), pair)
    (prompt,) = benchmark_prompts(pair, (40,), 1, settings.max_new_tokens)
    call = timed_call(method, [prompt], settings)
    assert method.name == "bild" and "fallback 0, rollback 3" in method.method.title
    # Fallback 0 never falls back, so only the end of the output shortens a draft.
    assert call.first_tokens == call.kept[0] + 1 if call.rounds == 1 else call.reached and call.drafted >= 4


def test_assisted_baseline_is_constant_and_leaves_the_draft_as_it_was(settings: Settings, pair: LoadedPair) -> None:
    before = pair.draft.generation_config
    (prompt,) = benchmark_prompts(pair, (40,), 1, 30)
    longer = Settings(**vars(settings) | {"max_new_tokens": 30})
    call = timed_call(assisted(longer, pair), [prompt], longer)
    assert pair.draft.generation_config is before and "generate" not in vars(pair.draft)
    assert before.num_assistant_tokens is None
    # The whole lookahead, unless the end is nearer; a draft may stop at EOS, which does not occur here.
    assert 4 * (call.rounds - 4) < call.drafted <= 4 * call.rounds and call.new_tokens == 30
    assert len(call.steps) == 5 and call.steps[4] >= call.rounds - 4


def test_an_accepted_eos_counts_as_accepted_in_transformers_loop_as_in_ours(settings: Settings) -> None:
    pair = load_pair(settings)
    assert pair.draft is not None
    (prompt,) = benchmark_prompts(pair, (40,), 1, 30)
    longer = Settings(**vars(settings) | {"max_new_tokens": 30})
    (tokens,) = timed_call(plain(pair), [prompt], longer).tokens
    agreed = 0
    # Whichever token ends the text: where the target reaches it in a draft, it was accepted.
    for eos in sorted(set(tokens)):
        for model in pair.models:
            model.generation_config.eos_token_id = eos
        methods = ours("speculative", chosen_keywords(longer, pair), pair), assisted(longer, pair)
        mine, theirs = (timed_call(method, [prompt], longer) for method in methods)
        for name in ("rounds", "drafted", "accepted", "reached", "kept", "new_tokens", "first_tokens", "overlap"):
            assert getattr(mine, name) == getattr(theirs, name), name
        agreed += mine.accepted == mine.new_tokens - mine.rounds + 1
    assert agreed > 0, "the case in question occurred"


def test_vocabularies_of_two_sizes(tmp_path) -> None:
    asked = settings_for(tmp_path)
    pair = load_pair(asked)
    pair.draft.resize_token_embeddings(VOCABULARY + 8)
    head = pair.draft.get_output_embeddings()
    (prompt,) = benchmark_prompts(pair, (40,), 1, asked.max_new_tokens)
    greedy = compared(asked, pair)
    assert [method.name for method in greedy] == METHODS
    calls = [timed_call(method, [prompt], asked) for method in greedy]
    assert all(call.tokens == calls[0].tokens for call in calls) and not can_ensemble(pair)
    # In sampling transformers would replace the head of the draft, which ours needs next.
    drawn = Settings(**vars(asked) | {"do_sample": True})
    assert [method.name for method in compared(drawn, pair)] == ["plain", "none recorded", "speculative"]
    assert "left out" in (assisted_refusal(drawn, pair) or "")
    timed_call(compared(drawn, pair)[-1], [prompt], drawn)
    assert pair.draft.get_output_embeddings() is head


def test_lookahead_defaults(settings: Settings, pair: LoadedPair, t5: tuple[Settings, LoadedPair]) -> None:
    assert lookahead(settings, pair) == 4 and lookahead(*t5) == 7
    assert lookahead(Settings(num_assistant_tokens=2), t5[1]) == 2
    auto = Settings(num_assistant_tokens="auto")
    assert (lookahead(auto, t5[1]), fixed_lookahead(auto, t5[1])) == ("auto", 7)
    assert lookahead(Settings(drafter="suffix"), pair) == "auto"


def test_sampling_depends_on_seed_and_example_only(settings: Settings, pair: LoadedPair) -> None:
    drawn = Settings(**vars(settings) | {"do_sample": True, "max_new_tokens": 12})
    first, second = benchmark_prompts(pair, (40,), 2, 12)
    runs = [timed_call(plain(pair), [prompt], drawn).tokens for prompt in (first, second, first)]
    assert runs[0] == runs[2]
    other = Settings(**vars(drawn) | {"seed": 7})
    assert timed_call(plain(pair), [first], other).tokens != runs[0]


def test_methods_take_turns(settings: Settings, pair: LoadedPair) -> None:
    asked = replace(settings, prompt_lengths=(40,))
    prompts, methods = benchmark_prompts(pair, (40,), 4, 7), compared(settings, pair)
    turns = list(in_turn(methods, batches_of(prompts, asked, 4), repeats=2))
    assert [(repeat, batch[0].index) for _, repeat, batch, _ in turns] == [(r, i) for r in (0, 1) for i in range(4)]
    for *_, turn in turns:
        assert {method.name for method in turn} == {*METHODS}
    assert set(Counter(turn[0].name for *_, turn in turns).values()) == {1, 2}, "eight turns of five"


def test_batches_hold_about_as_many_rows_at_every_size(settings: Settings, pair: LoadedPair) -> None:
    prompts = benchmark_prompts(pair, (30, 40), 6, 7)
    asked = replace(settings, prompt_lengths=(30, 40), batch_sizes=(1, 4, 6))
    sizes = [[len(batch) for batch in group] for group in batches_of(prompts, asked, 6)]
    assert sizes == 2 * [[1] * 6, [4], [6]]
    turns = in_turn(compared(settings, pair), batches_of(prompts, asked, 6)[1:2], repeats=1)
    assert [{method.name for method in turn} for *_, turn in turns] == [{"plain", "none recorded", "speculative"}]


def test_a_batch_of_uneven_prompts_decodes_what_each_prompt_does_alone(settings, pair, t5) -> None:
    for asked, loaded in ((replace(settings, max_new_tokens=20), pair), t5):
        prompts = [*benchmark_prompts(loaded, (33,), 1, 20), *benchmark_prompts(loaded, (47,), 1, 20)]
        for method in compared(replace(asked, batch_sizes=(2,)), loaded):
            batch = timed_call(method, prompts, asked)
            alone = [timed_call(method, [prompt], asked).tokens[0] for prompt in prompts]
            assert batch.tokens == tuple(alone), method.name
            assert batch.new_tokens == sum(map(len, alone))


def test_padding_behind_an_eos_is_no_token(settings: Settings) -> None:
    pair = load_pair(settings)
    asked = replace(settings, max_new_tokens=12)
    prompts = benchmark_prompts(pair, (30,), 3, 12)
    alone = [timed_call(plain(pair), [prompt], asked).tokens[0] for prompt in prompts]
    ends = next(token for token in alone[0][1:-1] if token not in alone[1])
    for model in pair.models:
        model.generation_config.eos_token_id = ends
    short = timed_call(plain(pair), prompts[:2], asked).tokens
    assert short == (alone[0][: alone[0].index(ends) + 1], alone[1]) and len(short[0]) < len(short[1])
    # Endless texts go on, and EOS is put back.
    endless = timed_call(plain(pair), prompts[:2], replace(asked, task="engines")).tokens
    assert list(endless) == alone[:2]
    assert all(model.generation_config.eos_token_id == ends for model in pair.models)


def test_endless_repeats_draw_anew_and_others_the_same(settings: Settings, pair: LoadedPair) -> None:
    drawn = replace(settings, do_sample=True, max_new_tokens=12)
    (prompt,) = benchmark_prompts(pair, (40,), 1, 12)
    for task, same in (("benchmark", True), ("engines", False)):
        asked = replace(drawn, task=task)
        texts = [timed_call(plain(pair), [prompt], asked, repeat=repeat).tokens for repeat in (0, 1)]
        assert (texts[0] == texts[1]) == same


def test_every_way_of_transformers_reaches_its_setting(settings: Settings, pair: LoadedPair) -> None:
    asked = replace(settings, max_new_tokens=30)
    (prompt,) = benchmark_prompts(pair, (40,), 1, 30)
    reference = timed_call(plain(pair), [prompt], asked).tokens
    longest = {}
    for schedule in SCHEDULES:
        call = timed_call(assisted(asked, pair, schedule), [prompt], asked)
        assert call.tokens == reference and call.rounds
        # Of the rounds after the first, and of the first by its positions.
        longest[schedule.words] = max(len(call.steps) - 1, len(call.reached))
    assert [longest[f"constant {tokens}"] for tokens in (2, 4, 6, 8)] == [2, 4, 6, 8]
    # A random draft is never sure, so that a higher bar ends its drafts sooner, behind a first token.
    assert longest["confidence 0.6"] <= longest["confidence 0.2"] and longest["confidence 0.6"] < 20
    assert longest["heuristic from 5"] != longest["constant 4"]
    found = timed_call(prompt_lookup(asked, pair), [prompt], asked)
    assert found.tokens == reference and found.rounds and len(found.steps) == 1, "no passes of a draft"
    # With hardly any weight on the target, what the draft says goes.
    lossy = [timed_call(ensemble(asked, pair, weight), [prompt], asked) for weight in (0.99, 0.01)]
    rates = [acceptance_rate(frame_of([call])) for call in lossy]
    assert rates[0] is not None and rates[1] is not None and rates[0] < rates[1] == 1.0
    assert lossy[1].tokens != reference and lossy[1].rounds and lossy[1].overlap is None


def test_titles_say_what_is_special(settings: Settings, pair: LoadedPair) -> None:
    keywords = {"num_assistant_tokens": "auto", "entropy_threshold": 0.5, "compile": True, "drafter": "hybrid"}
    contender = ours("speculative", keywords | {"verification": "block", "fallback_threshold": 0.1}, pair)
    method = contender.method
    assert method.title == "speculative decoding, auto, drafter hybrid, block, entropy stop 0.5, compiled"
    assert (method.engine, method.same_engine, contender.longest) == ("compiled", "none compiled", 16)
    assert "fallback_threshold" not in method.keywords, "speculative decoding has none"
    assert method.draft == pair.draft_name
    lookup = ours("speculative", {"drafter": "suffix", "num_assistant_tokens": 5}, pair)
    assert (lookup.method.draft, lookup.options) == (
        None, {"generation_strategy": "speculative", "num_assistant_tokens": 5, "drafter": "suffix"},
    )  # fmt: skip


def test_streamer_notes_puts_after_the_prompt_and_passes_all_on() -> None:
    inner = TimingStreamer()
    streamer = TimingStreamer(inner)
    for value in (torch.ones(1, 9), torch.ones(1), torch.ones(1, 3)):
        streamer.put(value)
    streamer.end()
    assert streamer.counts == inner.counts == [1, 3] and streamer.times == sorted(streamer.times)


def test_short_names(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(names, "real_models_folder", lambda: tmp_path)  # where nothing was brought
    for known in KNOWN_PAIRS:
        for name in (known.target, *known.drafts):
            assert full_name(name.rsplit("/", 1)[-1]) == name
        assert default_draft(known.target) == known.drafts[0]
    assert full_name("OPT-6.7B") == "facebook/opt-6.7b" and default_draft("OPT-6.7B") == "facebook/opt-125m"
    assert full_name("Llama-2-7b") == "meta-llama/Llama-2-7b-hf"
    assert full_name("TinyLlama-1.1B").startswith("TinyLlama/")
    for unknown in ("someone/else", "unheard-of"):
        assert full_name(unknown) == unknown and default_draft(unknown) is None


def test_drafts_of_another_kind_are_refused(tmp_path, settings: Settings) -> None:
    _, t5_draft = save_pair(tmp_path, encoder_decoder=True)
    mixed = Settings(**vars(settings) | {"assistant_model": str(t5_draft)})
    with pytest.raises(BenchError, match=r"--assistant_model: only one of .* is an encoder-decoder model"):
        load_pair(mixed)


@pytest.mark.parametrize("order", [1, 5])
def test_both_tokenizers_reach_the_call(order: int) -> None:
    """A draft with another tokenizer is measured as a user would call it."""
    target, draft = families.pair("llama")
    tokenizers = word_tokenizer(48), word_tokenizer(48, order)
    loaded = LoadedPair("target", target, tokenizers[0], draft_name="draft", draft=draft, draft_tokenizer=tokenizers[1])
    method = ours("speculative", {"num_assistant_tokens": 3}, loaded)
    assert (method.options["tokenizer"], method.options["assistant_tokenizer"]) == tokenizers
    call = {**families.prompts(1), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with method.surroundings(loaded):
        out = target.generate(**call, **method.options)
    assert torch.equal(out, target.generate(**call)) and last_speculation(target)
    assert "tokenizer" not in ours("speculative", {"drafter": "suffix"}, loaded).options
