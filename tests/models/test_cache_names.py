"""The cache goes by the name that the installed transformers gives it, in arguments, outputs and messages."""

import warnings

import pytest
import torch
from helpers import recurrent_families
from helpers.families import pair, prompts
from helpers.identity import same_as_plain, speculated
from transformers import DynamicCache, EncoderDecoderCache

import hf_specdec
from hf_specdec.models.cache_names import CACHE_NAME, OUTDATED_NAMES, cache_argument, cache_of
from hf_specdec.models.traits import takes_row_positions

SPECULATIVE = {"generation_strategy": "speculative"}
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize("family", ["Mamba2", "FalconH1"])
def test_no_call_of_a_recurrent_model_uses_an_outdated_name(no_name_is_outdated, family: str) -> None:
    """Of other families see `test_identity.py`."""
    target = recurrent_families.model(family)
    for settings in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        same_as_plain(target, recurrent_families.noisy(target), prompts(3), GREEDY, **settings)


@pytest.mark.skipif(not OUTDATED_NAMES, reason="no name is outdated in this version of transformers")
def test_an_outdated_name_would_be_noticed(no_name_is_outdated) -> None:
    """Control."""
    target, _ = pair("llama")
    with pytest.raises(FutureWarning, match="past_key_values"):
        target.generate(**prompts(1), **GREEDY, past_key_values=DynamicCache())
    with pytest.raises(AssertionError, match="past_key_values"):
        _ = target(**prompts(1)).past_key_values


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_an_output_has_the_fields_of_plain_generate_s(family: str) -> None:
    target, draft = pair(family)
    call = {**prompts(1), **GREEDY, "return_dict_in_generate": True}
    plain = target.generate(**call)
    ours = speculated(target, draft, **call, **SPECULATIVE)
    assert list(ours) == list(plain) and CACHE_NAME in ours
    assert getattr(ours, CACHE_NAME) is ours[CACHE_NAME] is cache_of(ours)
    assert type(getattr(ours, CACHE_NAME)) is type(getattr(plain, CACHE_NAME))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_taken_by_the_names_that_plain_generate_takes(name: str) -> None:
    """An outdated one with transformers' own warning; one that it doesn't know is refused."""
    target, draft = pair("llama")
    cache, inputs = DynamicCache(config=target.config), prompts(1)
    plain = target.generate(**inputs, **GREEDY)
    with hf_specdec.enable(target, assistant_model=draft), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if name not in (CACHE_NAME, *OUTDATED_NAMES):
            with pytest.raises(ValueError, match=f"{name}="):
                target.generate(**inputs, **GREEDY, **SPECULATIVE, **{name: cache})
            return
        assert torch.equal(target.generate(**inputs, **GREEDY, **SPECULATIVE, **{name: cache}), plain)
    assert cache.get_seq_length() == plain.shape[1] - 1
    assert any(name in str(warning.message) for warning in seen) == (name in OUTDATED_NAMES)


def test_a_filled_cache_for_rows_that_run_one_by_one_is_refused_by_its_name() -> None:
    target, draft = pair("bart")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    target(**prompts(3), decoder_input_ids=torch.full((3, 2), 5), **{CACHE_NAME: cache}, use_cache=True)
    start = torch.full((3, 3), 5)
    with pytest.raises(ValueError, match=f"^{CACHE_NAME}=EncoderDecoderCache is filled, and the 3 rows"):
        speculated(target, draft, **prompts(3), **GREEDY, **SPECULATIVE, decoder_input_ids=start, **{CACHE_NAME: cache})


@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "FalconMamba"])
def test_purely_recurrent_models_have_no_positions(family: str) -> None:
    """So rows of one pass may be at different ones. Control: BART's may not, whose rows run one by one."""
    model = recurrent_families.model(family)
    assert takes_row_positions(model)
    assert cache_argument(model) == ("cache" if OUTDATED_NAMES else "cache_params")
    assert not takes_row_positions(pair("bart")[0])
