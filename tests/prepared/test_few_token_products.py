"""Products over few tokens: the same numbers up to the order of additions, and only where they are over few."""

from itertools import product

import pytest
import torch
from helpers.patches import noted
from helpers.products import TOLERANCE, draw, joined, run
from torch.nn.functional import linear, scaled_dot_product_attention

from hf_specdec.prepared import few_token_products, joined_layers
from hf_specdec.prepared.few_token_products import MOST_TOKENS, FewTokenProducts
from hf_specdec.prepared.step_trace import trace, value_of

pytestmark = pytest.mark.compiles


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 12), (1, 7, 130), (2, 3, 1100), (13, 64), (16, 12), (2, 10, 50), (39, 64), (MOST_TOKENS, 33)],
    ids=str,
)
def test_linear_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rows, biased in product((1, 5, 35), (False, True)):
        states, weight, bias = draw(*shape, dtype=dtype), draw(rows, shape[-1], dtype=dtype), draw(rows, dtype=dtype)
        exact = linear(states.double(), weight.double())
        scale = exact.abs().amax().clamp(min=1)
        given = bias if biased else None
        with FewTokenProducts():
            found = linear(states, weight, bias=given)
        asked = exact if given is None else exact + given.double()
        assert found.dtype == dtype and found.shape == asked.shape
        torch.testing.assert_close(found.double() / scale, asked / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("tokens", [1, 6, 16, 40, MOST_TOKENS])
def test_float_products_are_as_precise_as_float_is(tokens: int) -> None:
    """Whichever way they are multiplied; sums of products of bfloat16 numbers would fail this."""
    states, weight = draw(tokens, 600, dtype=torch.float32), draw(35, 600, dtype=torch.float32)
    with FewTokenProducts():
        found = linear(states, weight).double()
    magnitude = linear(states.double().abs(), weight.double().abs())
    assert ((found - linear(states.double(), weight.double())) / magnitude).abs().max() < 2.0**-21


@pytest.mark.parametrize("missing", [True, False])
def test_many_tokens_are_multiplied_here_where_no_library_does_it(missing: bool, monkeypatch) -> None:
    monkeypatch.setattr(few_token_products, "_has_no_library", lambda dtype: missing)
    sent = noted(monkeypatch, few_token_products, "_linear")
    states, weight, bias = (draw(*shape, dtype=torch.bfloat16) for shape in ((3, MOST_TOKENS, 40), (5, 40), (5,)))
    with FewTokenProducts():
        found = linear(states, weight, bias)
        alone = torch.cat([linear(row[None], weight, bias) for row in states])
    assert len(sent) == missing + len(states) and found.shape == alone.shape
    torch.testing.assert_close(found, alone, rtol=0, atol=0 if missing else 0.1)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("slots", [1, 11, 128, 700])
def test_attention(heads: int, slots: int, dtype: torch.dtype) -> None:
    query = draw(2, 3, 4, 20, dtype=dtype).transpose(1, 2)
    key, value = (draw(2, heads, slots, 20, dtype=dtype) for _ in range(2))
    mask = draw(2, 1, 3, slots, dtype=dtype)
    mask = mask.masked_fill(mask > 0.5, torch.finfo(dtype).min)
    mask[..., 0] = 0
    mask[..., 300:] = torch.finfo(dtype).min  # no query sees the last slots
    options = {"scale": 0.3, "enable_gqa": heads < 4}
    for given in (mask, None):  # without one, as over an encoding
        exact = scaled_dot_product_attention(
            query.double(), key.double(), value.double(), given if given is None else given.double(), **options
        )
        with FewTokenProducts():
            found = scaled_dot_product_attention(query, key, value, attn_mask=given, **options)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("each_form")
def test_what_a_mask_hides_may_hold_anything() -> None:
    query, key, value = draw(1, 2, 3, 8), draw(1, 2, 300, 8), draw(1, 2, 300, 8)
    mask = torch.zeros(1, 1, 3, 300, dtype=torch.float64)
    mask[..., 5:] = torch.finfo(torch.float64).min
    with FewTokenProducts():
        asked = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        key[:, :, 5:], value[:, :, 5:] = torch.nan, torch.inf
        assert torch.equal(scaled_dot_product_attention(query, key, value, attn_mask=mask), asked)
        key[:, :, 4] = torch.nan
        assert scaled_dot_product_attention(query, key, value, attn_mask=mask).isnan().any()


@pytest.mark.parametrize("call", [
    lambda: linear(draw(MOST_TOKENS + 1, 12), draw(5, 12)),
    lambda: linear(draw(2, 12), draw(12, 5).t()),
    lambda: linear(draw(2, 12), torch.nn.Buffer(draw(5, 12)).as_subclass(torch.nn.Buffer)),
    lambda: scaled_dot_product_attention(draw(1, 2, 3, 8), draw(1, 2, 3, 8), draw(1, 2, 3, 8), is_causal=True),
    lambda: scaled_dot_product_attention(draw(1, 2, MOST_TOKENS + 1, 8), draw(1, 2, 16, 8), draw(1, 2, 16, 8),
                                         attn_mask=draw(1, 1, MOST_TOKENS + 1, 16)),
], ids=["many tokens", "transposed weights", "a class of its own", "causal", "many queries"])  # fmt: skip
def test_other_products_are_left_alone(call, monkeypatch) -> None:
    for name in ("_linear", "_attention"):
        monkeypatch.setattr(few_token_products, name, lambda *args, **kwargs: pytest.fail("sent to the kernels"))
    with FewTokenProducts():
        found = call()
    assert torch.equal(found, call())


@pytest.mark.parametrize("heads", [4, 2])
def test_shared_heads_are_read_where_they_are(heads: int) -> None:
    """As models repeat them for each head of the queries."""
    query, mask, cache = draw(1, 4, 3, 8), draw(1, 1, 3, 9), draw(1, heads, 9, 8)

    def step(query: torch.Tensor) -> list[torch.Tensor]:
        states = cache[:1, :, :9]
        repeated = states[:, :, None].expand(1, heads, 4 // heads, 9, 8).reshape(1, 4, 9, 8) if heads < 4 else states
        return [scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)]

    with FewTokenProducts():
        graph = trace(step, query)
    joined_layers.share_heads(graph)
    (node,) = (node for node in graph.nodes if node.target is torch.ops.hf_specdec.attention_double.default)
    assert value_of(node.args[1]).shape[1] == heads
    torch.testing.assert_close(run(graph, query), step(query), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rows", [(8, 3), (9, 4, 4), (5, 6, 7, 8)], ids=str)
def test_linear_layers_of_one_input_are_one_call(rows: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    """Every second layer has a bias; another layer, of another input, stands between them."""
    layers = [(draw(n, 40, dtype=dtype), draw(n, dtype=dtype) if at % 2 else None) for at, n in enumerate(rows)]
    states, other = (draw(1, tokens, 40, dtype=dtype) for _ in range(2))
    square = draw(40, 40, dtype=dtype)

    def step(states: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        return [linear(states, *layers[0]), linear(other, square), *(linear(states, *layer) for layer in layers[1:])]

    calls, found, each = joined(step, states, other)
    assert len(calls) == 1 + (len(rows) + 2) // 3
    assert all(map(torch.equal, found, each))


def test_a_layer_whose_weights_are_computed_is_called_where_it_stands() -> None:
    first, second = draw(8, 40), draw(8, 40)
    given = draw(1, 3, 40), draw(1)
    calls, found, each = joined(lambda states, scale: [linear(states, first), linear(states, second * scale)], *given)
    assert len(calls) == 2
    torch.testing.assert_close(found, each)


def test_rows_that_lie_apart_are_multiplied_as_they_are(monkeypatch) -> None:
    monkeypatch.setattr(few_token_products, "_has_no_library", lambda dtype: True)
    weight = draw(10, 64)
    for tokens in (MOST_TOKENS - 4, MOST_TOKENS + 36):
        states = draw(tokens, 2, 64)[:, -1:]
        with FewTokenProducts():
            found = linear(states, weight)
        torch.testing.assert_close(found, linear(states, weight))
