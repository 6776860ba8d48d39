"""A step's graph does what the step does, and a step that would do something else at another call has none."""

from collections.abc import Callable

import pytest
import torch
from helpers.families import ROWS_FAMILIES, pair
from helpers.products import run
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hf_specdec.prepared.step_trace import trace, value_of

GIVEN = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
CACHE = torch.zeros(2, 5, 4)


def _composite(given: Tensor) -> list[Tensor]:
    """Matrix products, views and attention, which torch takes apart."""
    query = functional.linear(given, WEIGHT).unsqueeze(1)
    return [functional.scaled_dot_product_attention(query, query, query), torch.einsum("bkd,de->bke", given, WEIGHT)]


def _in_place(given: Tensor) -> list[Tensor]:
    """Writes to a cache through a view and reads it again; writes to what `torch.tensor` makes."""
    CACHE[:, :3].copy_(given)
    CACHE[:, 4:].add_(1)
    count = torch.tensor([1.0, 2.0])
    count += given[0, 0, :2]
    return [CACHE[:, 1:] * 2, count, given.add_(0) + 1]


def _several(given: Tensor) -> list[Tensor]:
    """Operations of several results, one of them unused."""
    best, where = given.max(dim=-1)
    first, _, third = given.split(1, dim=1)
    return [best, where, first + third, torch.arange(3) + where.sum()]


def _places(given: Tensor) -> list[Tensor]:
    """Indexes by integers that were computed, as the verification of sampled drafts does."""
    return [given[torch.arange(2), given[:, :, 0].argmax(dim=1)]]


def _traced(step: Callable[[Tensor], list[Tensor]], given: Tensor) -> Graph:
    """A step's graph, which has the operations that `make_fx` finds."""
    graph, asked = trace(step, given.clone()), make_fx(step)(given.clone()).graph
    operations = []
    for one in (graph, asked):
        one.eliminate_dead_code()
        operations.append([node.target for node in one.nodes if node.op == "call_function"])
    assert operations[0] == operations[1]
    return graph


@pytest.mark.parametrize("step", [_composite, _in_place, _several, _places])
def test_the_graph_is_that_of_make_fx_and_computes_what_the_step_does(step: Callable[[Tensor], list[Tensor]]) -> None:
    with torch.no_grad():
        graph = _traced(step, GIVEN)
        for other in (GIVEN, GIVEN + 1):
            CACHE.zero_()
            found, cache = run(graph, other.clone()), CACHE.clone()
            CACHE.zero_()
            for one, expected in zip(found, step(other.clone()), strict=True):
                assert torch.equal(one, expected) and one.dtype == expected.dtype
            assert torch.equal(cache, CACHE)


@pytest.mark.parametrize("family", ROWS_FAMILIES)
def test_a_model_s_graph_is_that_of_make_fx(family: str) -> None:
    model, _ = pair(family)
    inputs = {"attention_mask": torch.zeros(1, 1, 4, 4, dtype=model.dtype), "position_ids": torch.arange(4)[None]}

    def step(tokens: Tensor) -> list[Tensor]:
        return [model(input_ids=tokens, **inputs, use_cache=False).logits]

    with torch.no_grad():
        graph = _traced(step, torch.tensor([[1, 2, 3, 4]]))
        assert len(graph.nodes) > 20
        other = torch.tensor([[4, 2, 2, 5]])
        assert torch.equal(run(graph, other)[0], step(other)[0])


@pytest.mark.parametrize("step", [
    lambda given: [given + 1] if given.sum() > 0 else [given],
    lambda given: [given * given[0, 0, 0].item()],
    lambda given: [given[given > 0]],
    lambda given: [given * WEIGHT[0, 0].item()],
], ids=["branch", "item", "nonzero", "weight"])  # fmt: skip
def test_a_step_that_reads_values_on_the_host_is_refused(step: Callable[[Tensor], list[Tensor]]) -> None:
    with pytest.raises(RuntimeError, match="reads values of a tensor"):
        trace(step, GIVEN)


def test_a_constant_has_one_node_and_is_the_tensor_itself() -> None:
    graph = trace(lambda given: [given @ WEIGHT + (given * 2) @ WEIGHT], GIVEN)
    (node,) = (node for node in graph.nodes if node.op == "get_attr")
    assert value_of(node) is WEIGHT


def test_a_tensor_given_twice_is_two_arguments() -> None:
    graph = trace(lambda one, other: [one - other], GIVEN, GIVEN)
    (difference,) = run(graph, GIVEN, 3 * GIVEN)
    torch.testing.assert_close(difference, -2 * GIVEN)
