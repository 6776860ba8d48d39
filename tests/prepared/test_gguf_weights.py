"""Products, embeddings and copies of weights in blocks: the numbers that the package gguf reads in them."""

import copy

import pytest
import torch
from helpers.gguf_blocks import HALVES, random_blocks, widened
from helpers.patches import noted
from helpers.products import draw
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import embedding, linear

from hf_specdec.gguf import weights
from hf_specdec.gguf.weights import GgufWeight
from hf_specdec.models.stored_tensors import stored_tensors
from hf_specdec.prepared.joined_layers import join_linears
from hf_specdec.prepared.step_trace import trace

pytestmark = pytest.mark.compiles

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}
COLUMNS = {"Q4_0": (32, 608), "Q4_1": (32, 608), "Q5_0": (96,), "Q5_1": (96,), "Q8_0": (32, 608)}


def _weight(rows: int, columns: int, kind: str, dtype: torch.dtype) -> tuple[GgufWeight, Tensor]:
    blocks = random_blocks(rows, columns, kind, seed=rows)
    numbers = widened(blocks, kind)
    assert numbers.abs().mean() > 0.01
    per_block = weights._numbers_of_block(kind)
    return GgufWeight(torch.from_numpy(blocks).view(rows, columns // per_block, -1), kind, dtype), numbers


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("kind", HALVES)
def test_products(kind: str) -> None:
    for columns in COLUMNS.get(kind, (256, 768)):
        for rows in (1, 6, 35):
            for tokens in ((1,), (2, 1), (3,), (5,), (2, 3), (16,), (64,)):
                _check_product(rows, columns, kind, torch.float32, tokens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", HALVES)
def test_products_with_other_numbers(kind: str, dtype: torch.dtype) -> None:
    for tokens in ((1,), (5,), (16,)):
        _check_product(35, 768, kind, dtype, tokens)


def _check_product(rows: int, columns: int, kind: str, dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    weight, numbers = _weight(rows, columns, kind, dtype)
    states, bias = draw(*tokens, columns, dtype=dtype), draw(rows, dtype=dtype)
    for given in (None, bias):
        found = linear(states, weight, given)
        asked = linear(states.double(), numbers.double(), None if given is None else given.double())
        assert found.dtype == dtype and found.shape == asked.shape
        size = asked.abs().amax().clamp(min=1)
        torch.testing.assert_close(found.double() / size, asked / size, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("kind", HALVES)
def test_rows_are_what_the_package_gguf_reads(kind: str) -> None:
    weight, numbers = _weight(35, 768, kind, torch.float32)
    indices = torch.tensor([[3, 34, 3], [0, 1, 2]])
    assert torch.equal(embedding(indices, weight), numbers[indices])
    assert torch.equal(weight.dequantize(), numbers)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("bias", [None, draw(35, dtype=torch.float32)], ids=["no bias", "bias"])
def test_many_tokens_meet_one_panel_after_another(kernels: bool, bias: Tensor | None, monkeypatch) -> None:
    weight, numbers = _weight(35, 768, "Q4_1", torch.float32)
    monkeypatch.setattr(weights, "PANEL", 8 * 768)
    if not kernels:
        monkeypatch.setattr(weights, "_has_kernels", lambda dtype: False)
    sizes = noted(monkeypatch, weights, "_widened", lambda weight, at: len(at))
    states = draw(5, 13, 768, dtype=torch.float32)
    torch.testing.assert_close(linear(states, weight, bias), linear(states, numbers, bias), rtol=0, atol=1e-4)
    assert sizes == [8, 8, 8, 8, 3]


@pytest.mark.parametrize("kind", HALVES)
def test_without_kernels(kind: str, monkeypatch) -> None:
    monkeypatch.setattr(weights, "_has_kernels", lambda dtype: False)
    weight, numbers = _weight(35, 768, kind, torch.float64)
    states = draw(3, 768)
    torch.testing.assert_close(linear(states, weight), linear(states, numbers.double()), rtol=0, atol=1e-12)
    assert torch.equal(embedding(torch.tensor([1, 4]), weight), numbers[[1, 4]].double())


def test_a_gradient_reaches_what_is_multiplied() -> None:
    weight, numbers = _weight(6, 256, "Q6_K", torch.float32)
    states = draw(2, 256, dtype=torch.float32).requires_grad_()
    linear(states, weight).sum().backward()
    torch.testing.assert_close(states.grad, numbers.sum(0).expand(2, -1))


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(number: float, tokens: int) -> None:
    weight, _ = _weight(6, 288, "Q4_1", torch.float32)
    states = draw(tokens, 288, dtype=torch.float32)
    states[-1, 280] = number
    assert not linear(states, weight)[-1].isfinite().any()
    assert linear(states, weight)[:-1].isfinite().all()


def test_an_index_of_no_row_is_an_error() -> None:
    weight, _ = _weight(6, 256, "Q8_0", torch.float32)
    for index in (-1, 6):
        with pytest.raises((IndexError, RuntimeError)):
            embedding(torch.tensor([index]), weight)


def test_it_is_a_parameter() -> None:
    """And says what to do where an operation is not one of its own."""
    stored, numbers = _weight(6, 256, "Q4_K", torch.float32)
    weight = Parameter(stored, requires_grad=False)
    assert isinstance(weight, Parameter) and isinstance(weight, GgufWeight)
    assert weight.shape == numbers.shape and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert list(stored_tensors(weight)) == [weight.blocks]
    layer = torch.nn.Linear(256, 6, bias=False)
    layer.weight = weight
    layer.to(torch.float64)
    assert layer.weight.blocks.data_ptr() == weight.blocks.data_ptr()
    torch.testing.assert_close(layer(draw(1, 256)), linear(draw(1, 256), numbers.double()))
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, Parameter) and torch.equal(twin.weight.blocks, weight.blocks)
    assert twin.weight.blocks.data_ptr() != weight.blocks.data_ptr()
    for operation in (lambda w: w + 1, lambda w: w[0], lambda w: w.t() @ w, lambda w: w.to("meta")):
        with pytest.raises(NotImplementedError, match=r"model\.dequantize"):
            operation(weight)


def test_layers_of_one_input_and_type_are_one_call() -> None:
    """Blocks of Q4_0 and Q4_K have as many bits, and aren't taken for each other."""
    kinds = ("Q4_0", "Q4_K", "Q4_0", "Q4_0", "Q4_K")
    layers = [_weight(4 + at, 256, kind, torch.float32)[0] for at, kind in enumerate(kinds)]
    with torch.no_grad():
        graph = trace(lambda states: [linear(states, layer) for layer in layers], draw(1, 3, 256, dtype=torch.float32))
    join_linears(graph)
    calls = [str(node.target) for node in graph.nodes if "linear" in str(node.target)]
    assert sorted(calls) == ["hf_specdec.gguf_linear_2_float.default", "hf_specdec.gguf_linear_3_float.default"]
