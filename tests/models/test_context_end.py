"""The end of a model's context: texts reach it as in plain `generate`, and drafts stay within it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import GPT, OPT, ROPE, bart, made, pair, pair_of, prompts
from helpers.identity import same_as_plain, speculated
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec.drafting.model_drafter import ModelDrafter
from hf_specdec.host.processors import HostProcessors
from hf_specdec.lengths.stop_rules import StopRule
from hf_specdec.prepared import cuda_graphs

POSITIONS = 30
GREEDY = {"do_sample": False, "eos_token_id": None}


BUILDS: dict[str, Callable[[int], PreTrainedModel]] = {
    "gpt2": lambda positions: made("GPT2", "LMHeadModel", **GPT, n_positions=positions)(),
    "opt": lambda positions: made("OPT", **OPT, max_position_embeddings=positions)(),
    "bart": lambda positions: bart(max_position_embeddings=positions)(),
    "llama": lambda positions: made("Llama", **{**ROPE, "max_position_embeddings": positions})(),
}


def with_longer_draft(kind: str, positions: int, longer: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that is like it but for noise and a longer context."""
    build = BUILDS[kind]
    target, noisy = pair_of(lambda: build(positions))
    draft = build(longer).to(target.dtype).eval()
    head = draft.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with torch.no_grad():
        for name, weight in noisy.state_dict().items():
            own = draft.state_dict()[name]
            own[: len(weight)] = weight
    return target, draft


@pytest.mark.parametrize("kind", ["gpt2", "opt", "bart"])
def test_texts_reach_the_last_position_of_a_table(kind: str) -> None:
    """Rows accept unevenly, so that one stands at the end while another's drafts are as long as ever."""
    target, draft = with_longer_draft(kind, POSITIONS, 2 * POSITIONS)
    for settings in ({}, {"drafter": "suffix", "num_assistant_tokens": 16}, {"num_assistant_tokens": 16}):
        out = same_as_plain(target, draft, prompts(4), {**GREEDY, "max_length": POSITIONS}, **settings)
        assert out.sequences.shape[1] == POSITIONS


@pytest.mark.parametrize("rows", [1, 4])
def test_texts_go_on_beyond_what_rotary_positions_were_trained_for(rows: int, monkeypatch) -> None:
    """Prepared rounds, which bound positions, leave such texts to the general ones."""
    monkeypatch.setattr(cuda_graphs, "captures", lambda device: True)
    target, draft = with_longer_draft("llama", POSITIONS, 4 * POSITIONS)
    call = {**GREEDY, "max_length": POSITIONS + 20}
    for settings in ({}, {"drafter": "none"}):
        same_as_plain(target, draft, prompts(rows), call, cache_implementation="static", **settings)


def test_a_draft_reads_up_to_its_last_position() -> None:
    """Drafting n tokens reads n - 1 of them behind the text."""
    runner: Any = SimpleNamespace(read=[0])
    drafter = ModelDrafter(runner, HostProcessors(LogitsProcessorList()), StopRule(4), vocabulary=8, max_positions=16)
    assert [drafter._limit([length], [9]) for length in range(12, 18)] == [4, 4, 3, 2, 1, 0]


def test_a_text_is_the_caller_s_own() -> None:
    """No view of working space, which plain `generate` doesn't return either."""
    target, draft = pair("llama")
    output = speculated(target, draft, **prompts(4), max_new_tokens=9, do_sample=False)
    assert output.is_contiguous() and output.untyped_storage().nbytes() == output.nbytes
