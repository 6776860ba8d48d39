"""The static cache with rows of different lengths: plain `generate`'s tokens, no data moved, expected memory."""

import pytest
import torch
from helpers.families import FAMILIES, ROWS_FAMILIES, exact_dtype, pair, prompts
from helpers.identity import speculated
from transformers import DynamicCache, StaticCache

import hf_specdec
from hf_specdec import SpeculativeDecoding, generation
from hf_specdec.drafting import drafter_choice
from hf_specdec.models import cache_choice, static_runner
from hf_specdec.models.cache_choice import supports_rows_cache
from hf_specdec.models.cache_names import CACHE_NAME, cache_of
from hf_specdec.models.static_cache import RowsCache, RowsLayer
from hf_specdec.models.static_runner import StaticRunner

NEW_TOKENS = 16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_cache_holds_keys_and_values_of_every_layer_for_all_rows_and_slots(family: str, monkeypatch) -> None:
    target, draft = pair(family)
    inputs, caches = prompts(3), {}
    end = StaticRunner.end
    monkeypatch.setattr(StaticRunner, "end", lambda self, n: (caches.update({self.model: self.cache}), end(self, n))[1])
    speculated(target, draft, **inputs, max_new_tokens=8, cache_implementation="static", do_sample=False)
    cache = caches[target]
    assert cache.capacity == inputs["input_ids"].shape[1] + 8 + 5
    config = target.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = config.hidden_size // config.num_attention_heads
    stored = [3, heads, cache.capacity, width]
    assert [list(tensor.shape) for tensor in cache.tensors()] == 2 * config.num_hidden_layers * [stored]
    assert {tensor.dtype for tensor in cache.tensors()} == {torch.float64}


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"own": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding", "bloom"])
def test_a_batch_goes_on_from_the_returned_cache_as_from_plain_generate_s(family: str, settings: dict) -> None:
    """Rows end apart, and what each of them has still to read is read then."""
    own = settings.get("own", False)
    target, draft = pair(family, dtype=exact_dtype(family, 4))
    inputs = prompts(4)
    first = target.generate(**inputs, max_new_tokens=30, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    ends = [first[0, 4].item(), first[2, 9].item(), first[3, 2].item()]
    again = []
    for drafts in (None, draft):
        call = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 30, "eos_token_id": ends}
        if own:
            call[CACHE_NAME] = DynamicCache(config=target.config)
        elif drafts is not None:
            call |= settings
        decoding = None if drafts is None else SpeculativeDecoding(drafts)
        out = target.generate(**inputs, **call, custom_generate=decoding)
        assert type(cache_of(out)) is DynamicCache
        assert not own or cache_of(out) is call[CACHE_NAME]
        new = torch.ones_like(out.sequences[:, inputs["input_ids"].shape[1] :])
        more = {
            "input_ids": torch.cat([out.sequences, inputs["input_ids"][:, -4:]], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], new, new[:, :1].expand(-1, 4)], dim=1),
        }
        again.append(target.generate(**more, **{CACHE_NAME: cache_of(out)}, max_new_tokens=8, do_sample=False))
    assert torch.equal(*again)


def test_static_rows_of_a_batch_grow_with_the_text(monkeypatch) -> None:
    sizes = []
    update = RowsLayer.update

    def measured(layer, *args, **kwargs):
        updated = update(layer, *args, **kwargs)
        sizes.append(layer.keys.nbytes + layer.values.nbytes)
        return updated

    monkeypatch.setattr(RowsLayer, "update", measured)
    monkeypatch.setattr("hf_specdec.models.static_cache.GROWTH", 16)
    target, draft = pair("llama")
    with hf_specdec.enable(target, assistant_model=draft, generation_strategy="speculative"):
        target.generate(**prompts(4), max_new_tokens=8, max_length=None, do_sample=False)
        short = sizes.copy()
        target.generate(**prompts(4), max_new_tokens=60, do_sample=False, eos_token_id=-1)
    assert len(set(short)) <= 2 < len(set(sizes))


def test_rolling_back_moves_nothing_and_what_is_rolled_back_has_no_effect() -> None:
    target, _ = pair("llama")
    inputs = prompts(3)
    ids = inputs["input_ids"]
    runner = StaticRunner(target, {**inputs, CACHE_NAME: RowsCache(target.config, 32)}, tuple(ids.shape))
    runner.forward(ids, 1)
    wanted = runner.forward(ids[:, :2], 2)
    runner.rewind([11, 11, 11])
    runner.forward(ids[:, 3:8], 1)
    keys = runner.cache.layers[0].keys
    runner.rewind([12, 11, 11])
    assert runner.cache.layers[0].keys is keys
    runner.rewind([11, 11, 11])
    again = runner.forward(ids[:, :2], 2)
    assert torch.equal(again, wanted)


def test_a_mask_that_shows_rejected_drafts_gives_other_logits(monkeypatch) -> None:
    """Negative control of the mask: a query that saw beyond its own slot would be noticed."""
    target, draft = pair("llama")
    plain = target.generate(**prompts(4), max_new_tokens=NEW_TOKENS, do_sample=False)

    made = static_runner.slot_masks
    monkeypatch.setattr(static_runner, "slot_masks", lambda *args: {kind: 0 * m for kind, m in made(*args).items()})
    out = speculated(
        target, draft, **prompts(4), max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static"
    )
    assert out.shape != plain.shape or not torch.equal(out, plain)


def test_models_that_cannot_say_so() -> None:
    for family in FAMILIES:
        assert supports_rows_cache(pair(family)[0], {}) == (family in ROWS_FAMILIES), family
    target, _ = pair("llama")
    assert not supports_rows_cache(target, {"token_type_ids": torch.zeros(1, 1)})


def test_a_static_cache_of_the_caller_s_own_is_refused_by_name() -> None:
    target, draft = pair("llama")
    with pytest.raises(ValueError, match=r"StaticCache.*cache_implementation"):
        speculated(
            target, draft, **prompts(1), max_new_tokens=4, **{CACHE_NAME: StaticCache(target.config, max_cache_len=64)}
        )


def test_a_first_pass_behind_text_that_the_cache_holds_sees_that_text() -> None:
    """Prepared rounds read a short prompt themselves; the runner's first pass then starts behind it."""
    target = pair("llama")[0]
    ids = torch.arange(3, 13).unsqueeze(0)
    cache = RowsCache(target.config, 20)
    kwargs = {CACHE_NAME: cache, "use_cache": True}
    first = StaticRunner(target, dict(kwargs), (len(ids), 2))
    first.forward(ids[:, :4], 1)
    second = StaticRunner(target, dict(kwargs), (len(ids), 2))
    second.read = [4]
    logits = second.forward(ids[:, 4:], 1)
    assert torch.allclose(logits, target(ids).logits[:, -1:])


@pytest.mark.parametrize("rows", [1, 3])
def test_long_texts_of_models_with_windows_drop_what_has_left_them(rows: int, monkeypatch) -> None:
    target, draft = pair("mistral-sliding")
    made: list[int] = []
    static_cache = generation.static_cache
    for module in (generation, drafter_choice):
        monkeypatch.setattr(module, "static_cache", lambda *args: (made.append(1), static_cache(*args))[1])
    call = {**prompts(rows), "max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = target.generate(**call)
    accepted = []
    for long_text, static in ((4096, 2), (16, 0)):
        monkeypatch.setattr(cache_choice, "LONG_TEXT", long_text)
        made.clear()
        output = speculated(target, draft, **call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and len(made) == static
        accepted.append([finished.accepted for finished in output.speculation.rounds])
    assert accepted[0] == accepted[1]
    assert cache_of(output).layers[0].keys.shape[2] < target.config.sliding_window
