"""Products with int8 and int4 weights read where they are: the numbers of the weights that they stand for."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from helpers.families import pair, prompts
from helpers.int8_weights import Int8Weight
from helpers.patches import choose_in_turn, interpret_compiled_steps, noted, returned
from helpers.products import TOLERANCE, draw, joined
from optimum.quanto import AbsmaxOptimizer, freeze, qfloat8, qint2, qint4, qint8, quantize, quantize_weight
from optimum.quanto.tensor.weights.qbytes import WeightQBytesLinearFunction
from torch import Tensor
from torch.nn.functional import linear

from hf_specdec import SpeculativeDecoding
from hf_specdec.bench.models.precision import unpack_without_compiler
from hf_specdec.models.fingerprint import weights_of
from hf_specdec.prepared import compiled_step, few_token_products
from hf_specdec.prepared.few_token_products import MOST_TOKENS, FewTokenProducts
from hf_specdec.prepared.quantized_weights import QuantizedParts, parts_of

pytestmark = pytest.mark.compiles
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    unpack_without_compiler()


def _layer(columns: int, rows: int, weights: object, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(draw(rows, columns))
        model[0].bias.copy_(draw(rows))
    _quantize(model, weights)
    return model[0]


def _quantize(model: torch.nn.Module, weights: object = qint8, **how: str) -> None:
    quantize(model, weights=weights, **how)
    freeze(model)


def _stands_for(parts: QuantizedParts) -> torch.Tensor:
    """`[N, K]` in float64."""
    values = parts.values
    if values.dtype == torch.uint8:
        values = torch.cat([values & 15, values >> 4])
    scale = parts.scale.double().repeat_interleave(values.shape[1] // parts.scale.shape[1], 1)
    if parts.shift is None:
        return scale * values
    shift = parts.shift.double().repeat_interleave(values.shape[1] // parts.scale.shape[1], 1)
    return scale * values - (shift * scale if parts.shift.dtype == torch.int8 else shift)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 12), (1, 7, 130), (2, 3, 1100), (MOST_TOKENS, 33), (13, 384)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_products(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    for rows, shifts in product((1, 6, 35), ("none", "numbers", "whole")):
        _check_products(shape, rows, bits, shifts, dtype)


def _check_products(shape: tuple[int, ...], rows: int, bits: int, shifts: str, dtype: torch.dtype) -> None:
    """`rows` of bytes, which hold a row or two each."""
    columns, stored = shape[-1], (rows, shape[-1])
    rows *= 8 // bits
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    values = torch.randint(low, high, stored, generator=torch.Generator().manual_seed(rows), dtype=kind)
    for groups in (groups for groups in (1, 3, 10) if columns % groups == 0):
        scale = (draw(rows, groups).abs() / 100).to(dtype)
        drawn = draw(rows, groups)
        shift = {"numbers": drawn.to(dtype), "whole": (9 * drawn).to(torch.int8)}.get(shifts)
        parts = QuantizedParts(values, scale, shift)
        states, bias = draw(*shape, dtype=dtype), draw(rows, dtype=dtype)
        for given in (None, bias):
            found = few_token_products.kernel("quantized_linear", dtype)(states, values, scale, parts.shift, given)
            asked = linear(states.double(), _stands_for(parts), None if given is None else given.double())
            size = asked.abs().amax().clamp(min=1)
            assert found.dtype == dtype and found.shape == asked.shape
            torch.testing.assert_close(found.double() / size, asked / size, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_a_large_number_leaves_the_others_precise(tokens: int) -> None:
    """Beside 10⁴, other numbers are known to 0.0006, with 16 bits alone to 0.15. Models have such numbers."""
    values = torch.randint(-128, 128, (8, 200), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    values[:, 3] = 0
    states, scale = draw(tokens, 200, dtype=torch.float32), torch.full((8, 1), 0.01)
    states[:, 3] = 1e4
    found = few_token_products.kernel("quantized_linear", torch.float32)(states, values, scale, None, None)
    asked = linear(states.double(), 0.01 * values.double())
    torch.testing.assert_close(found.double() / asked.abs().amax(), asked / asked.abs().amax(), rtol=0, atol=5e-3)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("power", [1, 3, 7])
def test_numbers_are_known_to_a_two_thousandth(power: int) -> None:
    """Of the mean size of the 64 around it, or as precisely as a float beside the token's largest one."""
    states = draw(40, 200, dtype=torch.float32) ** power
    values, scale = torch.eye(200).to(torch.int8), torch.ones(200, 1)
    found = few_token_products.kernel("quantized_linear", torch.float32)(states, values, scale, None, None)
    for line, read in zip(states.split(64, 1), found.split(64, 1), strict=True):
        size = line.abs().mean(1, keepdim=True) / 2000 + states.abs().amax(1, keepdim=True) / 2**23
        assert ((read - line).abs() <= size).all()


@pytest.mark.usefixtures("each_form")
def test_int8_products_do_not_depend_on_other_tokens() -> None:
    """So that a verification reads what a plain step would."""
    values = torch.randint(-128, 128, (35, 200), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    states, scale = draw(40, 200, dtype=torch.float32) ** 5, torch.full((35, 1), 0.01)
    product = few_token_products.kernel("quantized_linear", torch.float32)
    for tokens in (1, 5, 40):
        together = torch.cat([product(some, values, scale, None, None) for some in states.split(tokens)])
        alone = torch.cat([product(some, values, scale, None, None) for some in states.split(1)])
        assert torch.equal(together, alone)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_number_that_is_not_finite_stays_in_its_token(bad: float) -> None:
    values = torch.randint(1, 128, (8, 200), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    states, scale = draw(5, 200, dtype=torch.float32), torch.full((8, 1), 0.01)
    product = few_token_products.kernel("quantized_linear", torch.float32)
    asked = product(states, values, scale, None, None)
    for column in (0, 150, 199):
        spoilt = states.clone()
        spoilt[2, column] = bad
        found = product(spoilt, values, scale, None, None)
        assert not found[2].isfinite().any()
        assert torch.equal(found[[0, 1, 3, 4]], asked[[0, 1, 3, 4]])


@pytest.mark.parametrize("weights", [qint8, qint4], ids=str)
@pytest.mark.parametrize("columns", [64, 96, 256])
def test_layers_of_quanto(weights: object, columns: int, monkeypatch) -> None:
    _sent_and_as_quanto_has_it(_layer(columns, 10, weights, torch.float64), draw(2, 3, columns), monkeypatch)


@pytest.mark.parametrize("kinds", [(qint8,) * 5, (qint4,) * 3, (qint4, qint8, qint4)], ids=str)
def test_layers_of_one_input_and_kind_are_one_call(kinds: tuple[object, ...]) -> None:
    """Another layer, of another input, stands between them."""
    layers = [_layer(64, 4 + 2 * at, kind, torch.float64) for at, kind in enumerate(kinds)]
    states, other, apart = draw(1, 5, 64), draw(1, 5, 64), _layer(64, 6, qint8, torch.float64)

    def step(states: Tensor, other: Tensor) -> list[Tensor]:
        return [layers[0](states), apart(other), *(layer(states) for layer in layers[1:])]

    calls, found, each = joined(step, states, other)
    assert len(calls) == 1 + sum(-(-kinds.count(kind) // 3) for kind in {*kinds})
    assert all(map(torch.equal, found, each))


def test_prompts_of_any_length_are_multiplied_with_int8_weights(monkeypatch) -> None:
    """Their library would make a wide copy of each weight."""
    layer = _layer(96, 10, qint8, torch.float64)
    for rows, tokens in ((1, MOST_TOKENS + 1), (3, MOST_TOKENS), (2, 2 * MOST_TOKENS + 5)):
        _sent_and_as_quanto_has_it(layer, draw(rows, tokens, 96), monkeypatch)


def _sent_and_as_quanto_has_it(layer: torch.nn.Linear, states: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = noted(monkeypatch, few_token_products, "_quantized")
    with torch.no_grad(), FewTokenProducts():
        found = layer(states)
    assert len(sent) == 1
    with torch.no_grad():
        torch.testing.assert_close(found, layer(states), rtol=0, atol=1e-10)


def test_parts_share_the_weights_memory() -> None:
    whole, half = _layer(256, 10, qint8).weight, _layer(256, 10, qint4).weight
    for parts, values, scale in (
        (parts_of(whole), whole._data, whole._scale),
        (parts_of(half), half._data._data, half._scale),
    ):
        assert parts.values.data_ptr() == values.data_ptr() and parts.scale.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize(
    "call",
    [
        lambda: _layer(64, 8, qint4)(draw(MOST_TOKENS + 1, 64, dtype=torch.float32)),
        lambda: _layer(64, 8, qfloat8)(draw(2, 64, dtype=torch.float32)),
        lambda: _layer(64, 8, qint2)(draw(2, 64, dtype=torch.float32)),
        lambda: _layer(64, 9, qint4)(draw(2, 64, dtype=torch.float32)),
        lambda: linear(draw(2, 64), Int8Weight.of(draw(8, 64))),
    ],
    ids=["many tokens and 4 bits", "8 bits of floating point", "2 bits", "a row of two halves", "a class of its own"],
)
def test_other_weights_are_left_to_their_library(call: Callable, monkeypatch) -> None:
    monkeypatch.setattr(few_token_products, "_quantized", lambda *args, **kwargs: pytest.fail("sent to the kernel"))
    with torch.no_grad():
        with FewTokenProducts():
            found = call()
        assert torch.equal(found, call())


def test_a_scale_for_each_column_is_left_to_its_library() -> None:
    weight = torch.eye(8)
    for axis in (0, -1):
        scale = AbsmaxOptimizer()(weight, qint8, axis)
        assert (parts_of(quantize_weight(weight, qint8, axis, scale)) is None) is (axis == -1)


def test_a_class_without_the_parts_is_left_to_its_library(monkeypatch) -> None:
    weight = _layer(64, 8, qint8).weight
    assert parts_of(weight) is not None
    del weight._scale
    assert parts_of(weight) is None


@pytest.fixture
def interpreted(monkeypatch) -> None:
    interpret_compiled_steps(monkeypatch)
    monkeypatch.setattr(compiled_step, "supported", few_token_products.supported)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("weights", [qint8, qint4], ids=str)
@pytest.mark.parametrize("quantized", ["target", "draft", "both"])
def test_compiled_rounds(quantized: str, weights: object, monkeypatch) -> None:
    """Their greedy tokens are the quantized model's own, and no others after its weights are replaced."""
    target, draft = pair("llama", dtype=torch.float32)
    for name, model in (("target", target), ("draft", draft)):
        if quantized in (name, "both"):
            _quantize(model, weights, exclude="lm_head")
    inputs, read = prompts(1), returned(monkeypatch, few_token_products, "parts_of")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3, compile=True)
    answers = []
    for _ in range(2):
        answers.append(target.generate(**inputs, **GREEDY))
        assert torch.equal(target.generate(**inputs, **GREEDY, custom_generate=decoding), answers[-1])
        if quantized != "draft":
            weight = target.model.layers[0].mlp.down_proj.weight
            weight._scale = -3 * weight._scale
    assert read and None not in read and torch.equal(*answers) is (quantized == "draft")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compile", [True, False])
def test_the_prompt_s_last_token_meets_the_head_as_it_is_stored(compile: bool, monkeypatch) -> None:
    """A wide copy of the head would be the largest tensor of the call; without compiling, the library makes it."""
    target, draft = pair("llama", dtype=torch.float32)
    _quantize(target)
    head = target.lm_head.weight._data.data_ptr()
    products = noted(monkeypatch, few_token_products, "_quantized")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens=3, compile=compile)
    target.generate(**prompts(1, MOST_TOKENS + 10), **GREEDY, custom_generate=decoding)
    # A verification, of the drafts and the token before them, is of four.
    assert (1 in [input.shape[1] for parts, input, *_ in products if parts.values.data_ptr() == head]) is compile


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("compile", [True, False])
def test_a_draft_catches_up_with_plain_rounds_without_widening(compile: bool, monkeypatch) -> None:
    """Without compiling, its library multiplies, and widens the weights."""
    choose_in_turn(monkeypatch, 2, 0, 0)
    target, draft = pair("llama", dtype=torch.float32)
    _quantize(draft)
    multiplied = noted(monkeypatch, WeightQBytesLinearFunction, "forward")
    decoding = SpeculativeDecoding(draft, num_assistant_tokens="auto", compile=compile)
    target.generate(**prompts(1), **GREEDY, custom_generate=decoding)
    caught_up = [found.catch_up_seconds > 0 for found in decoding.stats.rounds if found.draft_steps]
    assert (len(caught_up) > 2 and all(caught_up[2:])) is compile and (not multiplied) is compile


def test_parts_of_a_weight_are_part_of_a_models_state() -> None:
    model, _ = pair("llama", dtype=torch.float32)
    _quantize(model)
    before = weights_of(model)
    assert weights_of(model) == before
    weight = model.model.layers[0].mlp.down_proj.weight
    weight._data = weight._data.clone()
    assert weights_of(model) != before
