"""Products over few tokens: the same numbers up to the order of additions, and only where they are over few."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.fx import GraphModule
from torch.nn.functional import linear, scaled_dot_product_attention

from hf_specdec.prepared import few_token_products, joined_layers
from hf_specdec.prepared.few_token_products import MOST_TOKENS, FewTokenProducts
from hf_specdec.prepared.step_trace import trace, value_of

pytestmark = pytest.mark.compiles

# The error of a sum of a few hundred products, and that of rounding the result once.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}


def _draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 12), (1, 7, 130), (2, 3, 1100), (13, 64), (16, 12), (2, 10, 50), (39, 64), (MOST_TOKENS, 33)],
    ids=str,
)
def test_linear_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for rows, biased in product((1, 5, 35), (False, True)):
        states, weight, bias = _draw(*shape, dtype=dtype), _draw(rows, shape[-1], dtype=dtype), _draw(rows, dtype=dtype)
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
    states, weight = _draw(tokens, 600, dtype=torch.float32), _draw(35, 600, dtype=torch.float32)
    with FewTokenProducts():
        found = linear(states, weight).double()
    magnitude = linear(states.double().abs(), weight.double().abs())
    assert ((found - linear(states.double(), weight.double())) / magnitude).abs().max() < 2.0**-21


@pytest.mark.parametrize("missing", [True, False])
def test_many_tokens_are_multiplied_here_where_no_library_does_it(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_token_products, "_has_no_library", lambda dtype: missing)
    send, sent = few_token_products._linear, []
    monkeypatch.setattr(few_token_products, "_linear", lambda *args, **kw: sent.append(args) or send(*args, **kw))
    states, weight, bias = (_draw(*shape, dtype=torch.bfloat16) for shape in ((3, MOST_TOKENS, 40), (5, 40), (5,)))
    with FewTokenProducts():
        found = linear(states, weight, bias)
        alone = torch.cat([linear(row[None], weight, bias) for row in states])
    assert len(sent) == missing + len(states)
    assert found.shape == alone.shape
    torch.testing.assert_close(found, alone, rtol=0, atol=0 if missing else 0.1)


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("slots", [1, 11, 128, 700])
def test_attention(heads: int, slots: int, dtype: torch.dtype) -> None:
    query = _draw(2, 3, 4, 20, dtype=dtype).transpose(1, 2)
    key, value = (_draw(2, heads, slots, 20, dtype=dtype) for _ in range(2))
    mask = _draw(2, 1, 3, slots, dtype=dtype)
    mask = mask.masked_fill(mask > 0.5, torch.finfo(dtype).min)
    mask[..., 0] = 0
    mask[..., 300:] = torch.finfo(dtype).min  # no query sees the last slots
    options = {"scale": 0.3, "enable_gqa": heads < 4}
    exact = scaled_dot_product_attention(
        query.double(), key.double(), value.double(), attn_mask=mask.double(), **options
    )
    with FewTokenProducts():
        found = scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("each_form")
def test_what_a_mask_hides_may_hold_anything() -> None:
    query, key, value = _draw(1, 2, 3, 8), _draw(1, 2, 300, 8), _draw(1, 2, 300, 8)
    mask = torch.zeros(1, 1, 3, 300, dtype=torch.float64)
    mask[..., 5:] = torch.finfo(torch.float64).min
    with FewTokenProducts():
        asked = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        key[:, :, 5:], value[:, :, 5:] = torch.nan, torch.inf
        assert torch.equal(scaled_dot_product_attention(query, key, value, attn_mask=mask), asked)
        key[:, :, 4] = torch.nan
        assert scaled_dot_product_attention(query, key, value, attn_mask=mask).isnan().any()


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear(_draw(MOST_TOKENS + 1, 12), _draw(5, 12)),
        lambda: linear(_draw(2, 12), _draw(12, 5).t()),
        lambda: linear(_draw(2, 12), torch.nn.Buffer(_draw(5, 12)).as_subclass(torch.nn.Buffer)),
        lambda: scaled_dot_product_attention(_draw(1, 2, 3, 8), _draw(1, 2, 3, 8), _draw(1, 2, 3, 8), is_causal=True),
        lambda: scaled_dot_product_attention(_draw(1, 2, 3, 8), _draw(1, 2, 5, 8), _draw(1, 2, 5, 8)),
        lambda: scaled_dot_product_attention(
            _draw(1, 2, MOST_TOKENS + 1, 8),
            _draw(1, 2, 16, 8),
            _draw(1, 2, 16, 8),
            attn_mask=_draw(1, 1, MOST_TOKENS + 1, 16),
        ),
    ],
    ids=["many tokens", "transposed weights", "a tensor class of its own", "causal", "no mask", "many queries"],
)
def test_other_products_are_left_alone(call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_linear", "_attention"):
        monkeypatch.setattr(few_token_products, name, lambda *args, **kwargs: pytest.fail("sent to the kernels"))
    with FewTokenProducts():
        found = call()
    assert torch.equal(found, call())


@pytest.mark.parametrize("heads", [4, 2])
def test_shared_heads_are_read_where_they_are(heads: int) -> None:
    """As models repeat them for each head of the queries."""
    query, mask, cache = _draw(1, 4, 3, 8), _draw(1, 1, 3, 9), _draw(1, heads, 9, 8)

    def step(query: torch.Tensor) -> list[torch.Tensor]:
        states = cache[:1, :, :9]
        repeated = states[:, :, None].expand(1, heads, 4 // heads, 9, 8).reshape(1, 4, 9, 8) if heads < 4 else states
        return [scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)]

    with FewTokenProducts():
        graph = trace(step, query)
    joined_layers.share_heads(graph)
    (node,) = (node for node in graph.nodes if node.target is torch.ops.hf_specdec.attention_double.default)
    assert value_of(node.args[1]).shape[1] == heads
    constants = {node.target: value_of(node) for node in graph.nodes if node.op == "get_attr"}
    torch.testing.assert_close(GraphModule(constants, graph)(query), step(query), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rows", [(8, 3), (9, 4, 4), (5, 6, 7, 8)], ids=str)
def test_linear_layers_of_one_input_are_one_call(rows: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    """Every second layer has a bias; another layer, of another input, stands between them."""
    layers = [(_draw(n, 40, dtype=dtype), _draw(n, dtype=dtype) if at % 2 else None) for at, n in enumerate(rows)]
    states, other, square = (
        _draw(1, tokens, 40, dtype=dtype),
        _draw(1, tokens, 40, dtype=dtype),
        _draw(40, 40, dtype=dtype),
    )

    def step(states: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        first = linear(states, *layers[0])
        between = linear(other, square)
        return [first, between, *(linear(states, *layer) for layer in layers[1:])]

    with FewTokenProducts():
        graph = trace(step, states, other)
        each = step(states, other)
    joined_layers.join_linears(graph)
    calls = [node.target for node in graph.nodes if "linear" in str(node.target)]
    assert len(calls) == 1 + (len(rows) + 2) // 3
    constants = {node.target: value_of(node) for node in graph.nodes if node.op == "get_attr"}
    for found, alone in zip(GraphModule(constants, graph)(states, other), each, strict=True):
        assert torch.equal(found, alone)


def test_a_layer_whose_weights_are_computed_is_called_where_it_stands() -> None:
    first, second = _draw(8, 40), _draw(8, 40)

    def step(states: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        return [linear(states, first), linear(states, second * scale)]

    given = (_draw(1, 3, 40), _draw(1))
    with FewTokenProducts():
        graph = trace(step, *given)
    joined_layers.join_linears(graph)
    constants = {node.target: value_of(node) for node in graph.nodes if node.op == "get_attr"}
    assert sum("linear" in str(node.target) for node in graph.nodes) == 2
    for found, alone in zip(GraphModule(constants, graph)(*given), step(*given), strict=True):
        torch.testing.assert_close(found, alone)


def test_rows_that_lie_apart_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_token_products, "_has_no_library", lambda dtype: True)
    weight = _draw(10, 64)
    for tokens in (MOST_TOKENS - 4, MOST_TOKENS + 36):
        states = _draw(tokens, 2, 64)[:, -1:]
        with FewTokenProducts():
            found = linear(states, weight)
        torch.testing.assert_close(found, linear(states, weight))
