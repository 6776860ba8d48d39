"""The host's view: processors, criteria, streamers and scores see what plain `generate` shows them."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.memory import LargeStorages
from helpers.models import EOS, PAD, VOCABULARY, encoder_prompts, llama, noisy, prompts
from helpers.stateful import Counter
from helpers.streamer import Streamer
from helpers.word_tokenizer import word_tokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

import hf_specdec
from hf_specdec.host.processors import HostProcessors
from hf_specdec.models.cache_names import cache_of

pytestmark = pytest.mark.usefixtures("enabled")
NEW_TOKENS = 20
STRATEGIES = {
    "speculative": {"generation_strategy": "speculative", "num_assistant_tokens": 4},
    "bild": {"generation_strategy": "bild", "rollback_threshold": 0.0, "fallback_threshold": 0.05},
}


def both(pair: tuple[PreTrainedModel, PreTrainedModel], strategy: str = "speculative", **call: Any) -> tuple[Any, Any]:
    """What plain and speculative `generate` answer to the same greedy call."""
    call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **call}
    return pair[0].generate(**call), pair[0].generate(**call, assistant_model=pair[1], **STRATEGIES[strategy])


class Recorder(LogitsProcessor):
    """Remembers every (row, prefix) that it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert len(input_ids) == len(scores)
        self.seen += [(row, tuple(text)) for row, text in enumerate(input_ids.tolist())]
        return scores + (input_ids[:, -1:] * 7 % 5 == torch.arange(scores.shape[1]) % 5) * 2.0


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_processor_sees_every_prefix_that_plain_generate_shows(pair, rows: int, strategy: str) -> None:
    """Padding included, each row under its own index; what it sees beyond are drafts."""
    inputs, recorders = prompts(rows), [Recorder(), Recorder()]
    call = {**inputs, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    expected = pair[0].generate(**call, logits_processor=LogitsProcessorList(recorders[:1]))
    output = pair[0].generate(
        **call, logits_processor=LogitsProcessorList(recorders[1:]), assistant_model=pair[1], **STRATEGIES[strategy]
    )
    assert torch.equal(output, expected)
    shown = set(recorders[0].seen)
    if rows == 1:
        assert shown <= set(recorders[1].seen)
    live = {(row, text) for row, text in shown if EOS not in text[inputs["input_ids"].shape[1] :]}
    assert live <= set(recorders[1].seen)


def test_no_more_is_drafted_than_the_text_has_room_for(pair) -> None:
    """The last token is the target's own."""
    decoding = hf_specdec.SpeculativeDecoding(pair[0], num_assistant_tokens=4)
    call = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "custom_generate": decoding}
    pair[0].generate(**prompts(1), **call)
    assert [r.drafted for r in decoding.stats.rounds] == [(4,), (2,)]


@pytest.mark.parametrize("lookahead", [10**8, 2**63])
def test_an_absurd_lookahead_takes_no_memory(pair, lookahead: int) -> None:
    call = {**prompts(2), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    plain = pair[0].generate(**call)
    for drafter in ("model", "suffix"):
        decoding = hf_specdec.SpeculativeDecoding(pair[1], num_assistant_tokens=lookahead, drafter=drafter)
        with LargeStorages(1 << 18) as large:
            assert torch.equal(pair[0].generate(**call, custom_generate=decoding), plain)
        assert large.peak == 0


def test_rows_without_a_position_are_padded_behind_their_text() -> None:
    """Behind it may stand drafts of earlier rounds."""
    recorder, ids = Recorder(), torch.arange(10, 34).view(3, 8)
    HostProcessors(LogitsProcessorList([recorder]), PAD)(ids, [2, 3, 4], [4, 1, 0], torch.zeros(3, 4, 5))
    longest = [text for _, text in recorder.seen if len(text) == 5]
    assert longest == [(10, 11, 12, 13, 14), (18, 19, 20, PAD, PAD), (26, 27, 28, 29, PAD)]


class Walk:
    """A constraint: row r may go on from token t to the tokens of t's residue class shifted by r, or end.

    Asked for a text that strays from this, or that has ended, it has no answer.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def __call__(self, row: int, text: Tensor) -> list[int]:
        tokens = text.tolist()
        for position in range(self.prompt_length, len(tokens)):
            if tokens[position] not in self.after(row, tokens[position - 1]) or tokens[position] == EOS:
                raise KeyError(f"row {row} was never allowed {tokens}")
        return self.after(row, tokens[-1])

    @staticmethod
    def after(row: int, token: int) -> list[int]:
        """The tokens that may follow."""
        return [EOS, *(t for t in range(2, VOCABULARY) if t % 4 == (token + row) % 4)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_constraints_are_asked_for_their_own_row_and_allowed_text_only(pair, strategy: str) -> None:
    inputs = prompts(4)
    walk, call = Walk(inputs["input_ids"].shape[1]), {**inputs, "do_sample": False, "max_new_tokens": 30}
    expected, output = both(pair, strategy, **call, prefix_allowed_tokens_fn=_padded(walk))
    assert torch.equal(output, expected)
    call |= {"assistant_model": pair[1], **STRATEGIES[strategy]}
    assert torch.equal(pair[0].generate(**call, prefix_allowed_tokens_fn=walk), expected)


@pytest.mark.parametrize(("drafter", "do_sample"), [("model", True), ("suffix", False), ("hybrid", True)])
def test_a_constraint_is_asked_once_for_each_text(pair, drafter: str, do_sample: bool, monkeypatch) -> None:
    """And more often where answers are not kept. It may fill one list again and again."""
    inputs, asked, filled = prompts(4), [], []
    walk = Walk(inputs["input_ids"].shape[1])

    def allowed(row: int, text: Tensor) -> list[int]:
        asked.append((row, *text.tolist()))
        filled[:] = walk(row, text)
        return filled

    def output() -> Tensor:
        asked.clear()
        torch.manual_seed(0)
        call = {**inputs, "do_sample": do_sample, "max_new_tokens": 30, "prefix_allowed_tokens_fn": allowed}
        return pair[0].generate(**call, assistant_model=pair[1], drafter=drafter, **STRATEGIES["speculative"])

    kept = output()
    assert len(set(asked)) == len(asked)
    texts = set(asked)
    monkeypatch.setattr(
        HostProcessors, "_answer", lambda self, constraint, row, text: constraint._prefix_allowed_tokens_fn(row, text)
    )
    assert torch.equal(output(), kept) and set(asked) == texts and len(asked) > len(texts)


def _padded(walk: Walk) -> Any:
    """The walk with an answer for ended rows, which plain `generate` goes on asking for."""

    def allowed(row: int, text: Tensor) -> list[int]:
        ended = EOS in text[walk.prompt_length :].tolist()
        return [PAD] if ended else walk(row, text)

    return allowed


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_constraint_that_ends_rows_is_never_asked_beyond_eos(pair, strategy: str) -> None:
    """Drafts end with EOS here at once: a text that has ended has no next token to ask for."""
    inputs = prompts(1)

    def allowed(row: int, text: Tensor) -> list[int]:
        grown = text.tolist()[inputs["input_ids"].shape[1] :]
        assert EOS not in grown
        return [EOS] if len(grown) == 3 else [5, 6, 7]

    expected, output = both(pair, strategy, **inputs, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(output, expected) and output[0, -1] == EOS


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 15, "sequence_bias": [[[EOS], 8.0]]},
    "bad_words_ids": {"bad_words_ids": [[19], [45, 45], [12, 53]]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "forced_bos_token_id": {"forced_bos_token_id": 7},
    "sequence_bias": {"sequence_bias": [[[19], -5.0], [[45, 21], 6.0]]},
    "suppress_tokens": {"suppress_tokens": [19, 45, 12], "begin_suppress_tokens": [46, 21]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (5, 1.5)},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_gives_plain_s_tokens(pair, name: str) -> None:
    for rows in (1, 4):
        expected, output = both(pair, **prompts(rows), **PROCESSORS[name])
        assert torch.equal(output, expected)
    without = pair[0].generate(**prompts(4), do_sample=False, max_new_tokens=NEW_TOKENS)
    assert name == "forced_bos_token_id" or not torch.equal(without, expected), "it has to matter"


@pytest.mark.parametrize("settings", [
    {"encoder_no_repeat_ngram_size": 2, "num_return_sequences": 1},
    {"encoder_repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 2},
    {"forced_bos_token_id": 9, "forced_eos_token_id": EOS},
], ids=lambda settings: next(iter(settings)))  # fmt: skip
def test_processors_of_encoder_decoder_models_give_plain_s_tokens(t5_pair, settings: dict) -> None:
    for rows in (1, 4):
        assert torch.equal(*both(t5_pair, **encoder_prompts(rows), **settings))


@pytest.mark.parametrize("rows", [1, 4])
def test_stop_strings_stop_where_plain_generate_stops(pair, rows: int) -> None:
    """The text is discarded beyond the stop, wherever in a round it falls."""
    tokenizer = word_tokenizer()
    plain = pair[0].generate(**prompts(rows), do_sample=False, max_new_tokens=NEW_TOKENS)
    widths = []
    for token in plain[0, 11:18].tolist():
        expected, output = both(pair, **prompts(rows), stop_strings=[tokenizer.decode([token])], tokenizer=tokenizer)
        assert torch.equal(output, expected)
        widths.append(output.shape[1] if rows == 1 else int((output[0] != PAD).sum()))
    assert len(set(widths)) > 3


@pytest.mark.parametrize("rows", [1, 4])
def test_any_of_several_eos_ids_ends_a_row(pair, rows: int) -> None:
    plain = pair[0].generate(**prompts(rows), do_sample=False, max_new_tokens=NEW_TOKENS)
    eos = [EOS, int(plain[0, -6]), int(plain[-1, -9])]
    expected, output = both(pair, **prompts(rows), eos_token_id=eos)
    assert torch.equal(output, expected) and not torch.equal(output, plain)


def test_lengths_are_kept_to_the_token(pair) -> None:
    """They may be fractions, as in plain `generate`."""
    for limit in (1, 2, 5, 6, 11, 7.0, 7.5, np.float64(7), np.int64(7)):
        by_count = both(pair, **prompts(3), eos_token_id=None, max_new_tokens=limit)
        assert torch.equal(*by_count)
        if type(limit) is int:
            by_length = both(pair, **prompts(3), eos_token_id=None, max_new_tokens=None, max_length=9 + limit)
            assert by_count[1].shape[1] == 9 + limit and torch.equal(*by_length)


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), ("llama", 4), ("t5", 1)])
def test_a_streamer_is_fed_as_by_plain_generate(pair, t5_pair, family: str, rows: int) -> None:
    """Beyond batch 1 as well: one `[B]` column after another, pads for rows that have ended."""
    models, inputs = (pair, prompts(rows)) if family == "llama" else (t5_pair, encoder_prompts(rows))
    streamers = [Streamer(), Streamer()]
    call = {**inputs, "do_sample": False, "max_new_tokens": 30}
    models[0].generate(**call, streamer=streamers[0])
    models[0].generate(**call, streamer=streamers[1], assistant_model=models[1], **STRATEGIES["speculative"])
    assert streamers[0].calls == streamers[1].calls
    assert len(streamers[1].calls) == 32 or family == "t5"


@pytest.mark.parametrize("kind", [None, Counter])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_scores_and_logits_are_plain_s(pair, t5_pair, rows: int, family: str, kind: type | None) -> None:
    """Column by column, for rows that have not ended, with a processor that keeps state as well."""
    models, inputs = (pair, prompts(rows)) if family == "llama" else (t5_pair, encoder_prompts(rows))
    call = {**inputs, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call |= {"repetition_penalty": 1.5, "max_new_tokens": 28, "do_sample": False}
    expected, output = (
        models[0].generate(**call, logits_processor=[] if kind is None else [kind()], **more)
        for more in ({}, {"assistant_model": models[1], **STRATEGIES["bild"]})
    )
    assert isinstance(output, type(expected)) and output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    start = output.sequences.shape[1] - len(output.scores)
    assert len(output.scores) == len(output.logits) == len(expected.scores)
    for column in range(len(output.scores)):
        live = ~(output.sequences[:, start : start + column] == EOS).any(dim=1)
        for kind in ("scores", "logits"):
            ours, theirs = getattr(output, kind)[column], getattr(expected, kind)[column]
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert torch.allclose(ours[live], theirs[live], atol=1e-5)
    assert not torch.allclose(output.scores[-1], output.logits[-1])


def test_a_dict_without_scores_has_none(pair) -> None:
    _, output = both(pair, **prompts(2), return_dict_in_generate=True)
    assert output.scores is None and output.logits is None and output.speculation.new_tokens > 0
    assert cache_of(output).get_seq_length() == output.sequences.shape[1] - 1


@pytest.mark.parametrize("rows", [1, 4])
def test_a_sampling_target_as_its_own_draft_accepts_everything(pair, rows: int) -> None:
    torch.manual_seed(0)
    call = {**prompts(rows), "do_sample": True, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    stats = pair[0].generate(**call, assistant_model=pair[0], **STRATEGIES["speculative"]).speculation
    assert stats.drafted == stats.accepted > 0 and stats.alpha == pytest.approx(1.0, abs=1e-5)


class ByGradient(LogitsProcessor):
    """Takes a gradient on the way, as guidance does; inference mode would not let it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            free = scores.requires_grad_()
            (slope,) = torch.autograd.grad((free * free).sum(), free)
        return scores.detach() + 0.1 * slope


def test_processors_of_the_caller_s_own_may_take_gradients() -> None:
    target = llama()
    call = {"max_new_tokens": 12, "do_sample": False, "logits_processor": LogitsProcessorList([ByGradient()])}
    plain = target.generate(**prompts(2), **call)
    decoding = hf_specdec.SpeculativeDecoding(noisy(target))
    assert torch.equal(target.generate(**prompts(2), **call, custom_generate=decoding), plain)


def test_the_shortest_of_several_maximum_lengths_counts(pair) -> None:
    for lengths in ((20, 15), (15, 20)):
        criteria = StoppingCriteriaList(MaxLengthCriteria(length) for length in lengths)
        expected, output = both(pair, "speculative", **prompts(3), stopping_criteria=criteria)
        assert torch.equal(output, expected) and output.shape[1] == 15
