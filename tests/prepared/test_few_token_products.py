"""Narrow products as sums: the same numbers but for the order of additions, and only where they are narrow."""

from __future__ import annotations

import pytest
import torch
from helpers.families import FAMILIES, pair, prompts
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.prepared import few_token_products
from hf_specdec.prepared.few_token_products import WIDEST, NarrowProducts, as_loops

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class Products(TorchDispatchMode):
    """Counts what is left to libraries of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def _draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 1, 12), (1, 7, 12), (2, 3, 12), (WIDEST, 12)])
@pytest.mark.parametrize("bias", [None, 5])
def test_narrow_linear_layers_are_sums(shape: tuple[int, ...], bias: int | None) -> None:
    states, weight, bias = _draw(*shape), _draw(5, 12), None if bias is None else _draw(bias)
    with NarrowProducts(), Products() as left:
        found = linear(states, weight, bias=bias)
    assert not left.count
    torch.testing.assert_close(found, linear(states, weight, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["additive", "bool", "of heads"])
def test_narrow_attention_is_that_of_torch(heads: int, kind: str) -> None:
    query, key, value = _draw(2, 4, 3, 8), _draw(2, heads, 11, 8), _draw(2, heads, 11, 8)
    mask = _draw(2, 4 if kind == "of heads" else 1, 3, 11)
    if kind == "bool":
        mask = mask > -0.5
    options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": heads < 4}
    with NarrowProducts(), Products() as left:
        found = scaled_dot_product_attention(query, key, value, **options)
    assert not left.count
    torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value, **options), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear(_draw(WIDEST + 1, 12), _draw(5, 12)),
        lambda: linear(_draw(2, 12, dtype=torch.bfloat16), _draw(5, 12, dtype=torch.bfloat16)),
        lambda: linear(_draw(2, 12), torch.nn.Buffer(_draw(5, 12)).as_subclass(torch.nn.Buffer)),
        lambda: scaled_dot_product_attention(_draw(1, 2, 3, 8), _draw(1, 2, 3, 8), _draw(1, 2, 3, 8), is_causal=True),
        lambda: scaled_dot_product_attention(_draw(1, 2, 3, 8), _draw(1, 2, 5, 8), _draw(1, 2, 5, 8)),
        lambda: scaled_dot_product_attention(
            _draw(2, 2, WIDEST, 8), _draw(2, 2, 16, 8), _draw(2, 2, 16, 8), attn_mask=_draw(2, 1, WIDEST, 16)
        ),
    ],
    ids=["wide", "bfloat16", "a tensor class of its own", "causal", "without a mask", "wide attention"],
)
def test_other_products_are_left_alone(call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear", "attention"):
        monkeypatch.setattr(few_token_products, name, lambda *args, **kwargs: pytest.fail("written as sums"))
    with NarrowProducts():
        found = call()
    assert torch.equal(found, call())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_narrow_pass_is_the_same_and_calls_no_products_of_linear_layers(family: str) -> None:
    target, _ = pair(family)
    inputs = prompts(1, 6)
    if target.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        asked = target(**inputs).logits
        with Products() as before:
            target(**inputs)
        with Products() as left:
            found = as_loops(lambda: target(**inputs).logits)()
    torch.testing.assert_close(found, asked, rtol=0, atol=1e-10)
    # GPT-2's layers are no linear ones; models with attention of their own call products there.
    assert left.count < before.count or family == "gpt2"
