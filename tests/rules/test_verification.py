"""Draws and acceptance rules as theorems: chosen uniforms, exact output distributions by integration, no models."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from hf_specdec.rules.round_statistics import Round, SpeculationStats, reached_overlap
from hf_specdec.rules.sampling import draw, uniforms
from hf_specdec.rules.verification import Verification, block_verification, greedy, speculative_sampling

P = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.6, 0.1, 0.2], dtype=torch.float64)
LAST = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)


def judge(token: int, u_accept: float, u_next: float, p: Tensor = P, q: Tensor | None = Q) -> tuple[int, int]:
    """One drafted token judged: accepted drafts and the next token."""
    verified = speculative_sampling(
        torch.stack([p, LAST]).unsqueeze(0),
        torch.tensor([[token]]),
        torch.tensor([1]),
        None if q is None else q.view(1, 1, -1),
        torch.tensor([[u_accept, u_next]], dtype=torch.float64),
    )
    return int(verified.n_accepted), int(verified.next_token)


def test_the_ratio_itself_rejects_so_that_a_forbidden_token_never_passes() -> None:
    """u = 0 is a possible draw: `u * q <= p` would let a token with p = 0 through."""
    assert judge(3, 0.0, 0.0) == (0, 0)
    half = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    certain = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert judge(0, 0.5, 0.0, p=half, q=certain)[0] == 0


def test_a_point_mass_equals_a_one_hot_distribution() -> None:
    one_hot = torch.nn.functional.one_hot(torch.tensor(1), 4).double()
    grid = [(a / 20, b / 20) for a, b in product(range(20), range(20))]
    assert [judge(1, a, b, q=None) for a, b in grid] == [judge(1, a, b, q=one_hot) for a, b in grid]


def test_an_acceptance_after_a_rejection_does_not_count() -> None:
    verified = speculative_sampling(
        torch.stack([P, P, LAST]).unsqueeze(0),
        torch.tensor([[3, 0]]),
        torch.tensor([2]),
        torch.stack([Q, Q]).unsqueeze(0),
        torch.zeros(1, 3, dtype=torch.float64),
    )
    assert int(verified.n_accepted) == 0


def test_a_rejection_that_leaves_nothing_to_draw_from_draws_from_the_target() -> None:
    """Sums that rounding keeps from one: p nowhere exceeds q, and still its impossible token must not come."""
    p = torch.tensor([[[0.4, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    for uniform, expected in ((0.1, 0), (0.9, 1)):
        uniforms = torch.tensor([[0.9, uniform]])
        verified = speculative_sampling(p, torch.tensor([[0]]), torch.tensor([1]), q, uniforms)
        assert (int(verified.n_accepted), int(verified.next_token)) == (0, expected)


def test_overlap_is_summed_over_reached_positions_only() -> None:
    """Σ min(p, q) = 0.1 + 0.3 + 0.1 = 0.5 at each position; the second is reached only by an acceptance."""
    for first, expected in ((0, 1.0), (3, 0.5)):
        verified = _two_drafts([first, 0])
        assert verified.overlap.tolist() == [pytest.approx([0.5, 0.5])]
        assert reached_overlap(verified.overlap[0].tolist(), int(verified.n_accepted), 2) == pytest.approx(expected)
    assert reached_overlap([0.5, 0.5], 2, 2) == 1.0


def _two_drafts(tokens: list[int]) -> Verification:
    return speculative_sampling(
        torch.stack([P, P, LAST]).unsqueeze(0),
        torch.tensor([tokens]),
        torch.tensor([2]),
        torch.stack([Q, Q]).unsqueeze(0),
        torch.full((1, 3), 0.01, dtype=torch.float64),
    )


@pytest.mark.parametrize("rule", [greedy, speculative_sampling, block_verification])
@pytest.mark.parametrize("points", [True, False])
def test_positions_past_a_row_s_length_are_ignored(rule, points: bool) -> None:
    """Whatever stands there: a row judged among longer ones equals the row judged alone."""
    torch.manual_seed(0)
    rows, lookahead, vocabulary = 40, 4, 5
    p = torch.rand(rows, lookahead + 1, vocabulary, dtype=torch.float64).softmax(-1)
    q = torch.rand(rows, lookahead, vocabulary, dtype=torch.float64).softmax(-1)
    uniforms = torch.rand(rows, lookahead + 1, dtype=torch.float64)
    lengths = torch.randint(0, lookahead + 1, (rows,))
    # The target's favourites, so that positions past the length would be accepted if they were looked at.
    tokens = p[:, :lookahead].argmax(-1)
    together = rule(p, tokens, lengths, None if points else q, uniforms)
    for row in range(rows):
        n = int(lengths[row])
        own_uniforms = torch.cat([uniforms[row, :n], uniforms[row, -1:]]).unsqueeze(0)
        alone = rule(
            p[row : row + 1, : n + 1],
            tokens[row : row + 1, :n],
            lengths[row : row + 1],
            None if points else q[row : row + 1, :n],
            own_uniforms,
        )
        assert int(alone.n_accepted) == int(together.n_accepted[row]) <= n
        assert int(alone.next_token) == int(together.next_token[row])
        assert alone.overlap[0].tolist() == pytest.approx(together.overlap[row, :n].tolist())


def test_greedy_keeps_the_longest_prefix_of_argmaxes() -> None:
    choices = torch.tensor([2, 0, 1, 2])
    scores = torch.nn.functional.one_hot(choices, 3).double()
    for drafts in product(range(3), repeat=3):
        expected = next((i for i in range(3) if drafts[i] != choices[i]), 3)
        verified = greedy(scores.unsqueeze(0), torch.tensor([drafts]), torch.tensor([3]))
        assert int(verified.n_accepted) == expected
        assert verified.overlap.tolist() == [[float(a == b) for a, b in zip(drafts, choices, strict=False)]]
        assert int(verified.next_token) == choices[expected]


def test_rows_that_have_ended_take_part_in_no_pass() -> None:
    """τ of two rows, of which one ends after the first round: 6 tokens in 3 passes."""
    times = {"draft_seconds": 0.0, "verify_seconds": 0.0, "seconds": 0.0, "draft_steps": 2, "width": 3}
    rounds = [Round((2, 2), (2, 0), (3, 1), (2.0, 0.0), **times), Round((2, 0), (1, 0), (2, 0), (1.0, 0.0), **times)]
    stats = SpeculationStats("speculative", rounds)
    assert (stats.target_passes, stats.tokens_per_round) == (3, 2.0)
    assert stats.acceptance_by_position == [2 / 3, 1 / 2]


def test_greedy_breaks_ties_as_argmax_does() -> None:
    """The second of two equal maxima is not what plain decoding would choose."""
    scores = torch.tensor([[[1.0, 1.0], [0.0, 1.0]]])
    verified = [greedy(scores, torch.tensor([[token]]), torch.tensor([1])) for token in (0, 1)]
    assert [int(v.n_accepted) for v in verified] == [1, 0]
    assert [int(v.next_token) for v in verified] == [1, 0]


def test_a_draw_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.tensor([0.0, 0.4, 0.0, 0.6, 0.0])
    largest_below_one = 1.0 - 2.0**-24
    drawn = [int(draw(weights, torch.tensor(u))) for u in (0.0, 0.3999, 0.4001, largest_below_one)]
    assert drawn == [1, 1, 3, 3]


def _exact_outputs(
    p: dict[tuple[int, ...], Tensor], q: dict[tuple[int, ...], Tensor], points: bool, grid: int, loosen: float = 1.0
) -> dict[tuple[int, int], float]:
    """The distribution of the first two tokens of one round with γ = 1, integrated over a grid of uniforms.

    Midpoints of `grid` equal cells are exact when every threshold is a multiple of 1 / grid.
    """
    middles = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    u_accept, u_next = (u.reshape(-1) for u in torch.meshgrid(middles, middles, indexing="ij"))
    uniforms = torch.stack([u_accept * loosen, u_next], dim=1)
    cells = len(uniforms)
    outputs: dict[tuple[int, int], float] = {}
    for draft, q_draft in enumerate(q[()].tolist()):
        if q_draft == 0:
            continue
        verified = speculative_sampling(
            torch.stack([p[()], p[(draft,)]]).expand(cells, 2, -1),
            torch.full((cells, 1), draft),
            torch.ones(cells, dtype=torch.long),
            None if points else q[()].expand(cells, 1, -1),
            uniforms,
        )
        for n, token in zip(verified.n_accepted.tolist(), verified.next_token.tolist(), strict=True):
            # A rejected round yields one token: the target goes on by itself after it.
            tails = [((draft, token), 1.0)]
            if n == 0:
                tails = [((token, second), weight) for second, weight in enumerate(p[(token,)].tolist())]
            for pair, weight in tails:
                outputs[pair] = outputs.get(pair, 0.0) + q_draft * weight / cells
    return outputs


def _toy() -> tuple[dict[tuple[int, ...], Tensor], dict[tuple[int, ...], Tensor]]:
    p = {
        (): [0.5, 0.3, 0.2, 0.0],
        (0,): [0.25, 0.5, 0.25, 0.0],
        (1,): [0.0, 0.0, 0.75, 0.25],
        (2,): [1.0, 0.0, 0.0, 0.0],
        (3,): [0.0, 0.0, 0.0, 1.0],
    }
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in p.items()}, {(): Q}


@pytest.mark.parametrize("points", [False, True])
def test_the_output_is_distributed_exactly_as_the_target_s_own(points: bool) -> None:
    """By enumeration, not by chance: the sum over drafts of an integral over both uniforms."""
    p, q = _toy()
    # Every threshold is a multiple of 1/280: tenths, quarters, and with points the fifths, sevenths and eighths
    # of what p leaves without a token.
    outputs = _exact_outputs(p, q, points, grid=280)
    for pair in product(range(4), repeat=2):
        expected = float(p[()][pair[0]] * p[(pair[0],)][pair[1]])
        assert outputs.get(pair, 0.0) == pytest.approx(expected, abs=1e-9)


def test_a_loosened_acceptance_is_seen_by_the_enumeration() -> None:
    """Negative control: accepting a draft 10% more often moves the distribution by far more than the tolerance."""
    p, q = _toy()
    outputs = _exact_outputs(p, q, points=False, grid=280, loosen=1 / 1.1)
    errors = [
        abs(outputs.get(pair, 0.0) - float(p[()][pair[0]] * p[(pair[0],)][pair[1]]))
        for pair in product(range(4), repeat=2)
    ]
    assert max(errors) > 0.01


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_draws_do_not_depend_on_the_default_dtype(bfloat16_by_default) -> None:
    """In bfloat16 a token of probability 0.001 came with 0.0029; 20 standard deviations are allowed here."""
    torch.manual_seed(0)
    numbers = uniforms(1_000_000, device=torch.device("cpu"))
    assert numbers.dtype == torch.float32
    weights = torch.tensor([0.999, 0.001], dtype=torch.float32).expand(len(numbers), 2)
    share = draw(weights, numbers).double().mean().item()
    assert abs(share - 0.001) < 20 * (0.001 / len(numbers)) ** 0.5


@pytest.mark.parametrize("weights", [[0.5, float("nan")], [0.0, 0.0], [float("inf"), 1.0]])
def test_weights_that_are_no_distribution_give_no_token(weights: list[float]) -> None:
    rows = torch.tensor([weights, [0.5, 0.5]])
    assert draw(rows, torch.tensor([0.7, 0.7])).tolist() == [-1, 1]
