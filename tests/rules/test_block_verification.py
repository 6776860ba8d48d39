"""Block verification by exact enumeration: every draft of a toy vocabulary, thresholds found by bisection."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from hf_specdec.rules.verification import Rule, block_verification, speculative_sampling

VOCABULARY = 3
LOOKAHEAD = 3
ALMOST_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Toy:
    """All drafts of a tree of random distributions.

    Args:
        paths: every draft of `LOOKAHEAD` tokens.
        p, q: `[paths, LOOKAHEAD + 1, V]`, target and draft after each prefix of each path.
        lengths: `[paths]`, where drafting stopped; it depends on the tokens before only.
        points: drafts are point masses: only one path is ever drafted.
    """

    paths: list[tuple[int, ...]]
    p: Tensor
    q: Tensor
    lengths: Tensor
    points: bool = False

    @property
    def weights(self) -> Tensor:
        """`[paths]`: how often each is drafted."""
        if self.points:
            return torch.nn.functional.one_hot(torch.tensor(7), len(self.paths)).double()
        return self._of_paths(self.q)

    def probability(self, path: int) -> float:
        """The target's probability of a path."""
        return float(self._of_paths(self.p)[path])

    def _of_paths(self, probs: Tensor) -> Tensor:
        return probs[:, :LOOKAHEAD].gather(2, torch.tensor(self.paths).unsqueeze(2)).squeeze(2).prod(dim=1)


def toy(seed: int, *, stops: bool = False, points: bool = False) -> Toy:
    generator = torch.Generator().manual_seed(seed)
    paths = list(product(range(VOCABULARY), repeat=LOOKAHEAD))
    prefixes = [prefix for n in range(LOOKAHEAD + 1) for prefix in product(range(VOCABULARY), repeat=n)]
    trees = [
        {x: (2.0 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)).softmax(-1) for x in prefixes}
        for _ in range(2)
    ]
    stopping = {x for x in prefixes if stops and torch.rand((), generator=generator) < 0.3}
    lengths = [next((n for n in range(LOOKAHEAD) if path[:n] in stopping), LOOKAHEAD) for path in paths]
    p, q = (torch.stack([torch.stack([t[x[:n]] for n in range(LOOKAHEAD + 1)]) for x in paths]) for t in trees)
    return Toy(paths, p, q, torch.tensor(lengths), points)


def run(rule: Rule, toy: Toy, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    draft_probs = None if toy.points else toy.q[:, :LOOKAHEAD]
    verified = rule(toy.p, torch.tensor(toy.paths), toy.lengths, draft_probs, uniforms)
    return verified.n_accepted, verified.next_token


def bisect(holds, rows: int) -> Tensor:
    """`[rows]`: up to which uniform number a condition holds, to the last bits."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for _ in range(48):
        middle = (low + high) / 2
        true = holds(middle)
        low, high = torch.where(true, middle, low), torch.where(true, high, middle)
    return low


def accepted_odds(rule: Rule, toy: Toy) -> Tensor:
    """`[paths, LOOKAHEAD + 1]`: the distribution of the number of tokens kept by a rule that keeps the last block."""
    rows = len(toy.paths)
    odds, left = torch.zeros(rows, LOOKAHEAD + 1, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for n in range(LOOKAHEAD, 0, -1):

        def keeps(u: Tensor, n: int = n) -> Tensor:
            uniforms = torch.full((rows, LOOKAHEAD + 1), ALMOST_ONE, dtype=torch.float64)
            uniforms[:, n - 1] = u
            return run(rule, toy, uniforms)[0] >= n

        threshold = bisect(keeps, rows)
        odds[:, n] = left * threshold
        left = left * (1 - threshold)
    odds[:, 0] = left
    return odds


def next_odds(rule: Rule, toy: Toy, n: int) -> Tensor:
    """`[paths, V]`: the distribution of the token after `n` kept ones."""
    rows = len(toy.paths)

    def up_to(token: int) -> Tensor:
        def below(u: Tensor) -> Tensor:
            uniforms = torch.full((rows, LOOKAHEAD + 1), ALMOST_ONE, dtype=torch.float64)
            uniforms[:, max(n - 1, 0)] = 0.0 if n else ALMOST_ONE
            uniforms[:, -1] = u
            return run(rule, toy, uniforms)[1] <= token

        return bisect(below, rows)

    cumulative = torch.stack([up_to(token) for token in range(VOCABULARY)], dim=1)
    return torch.diff(cumulative, dim=1, prepend=torch.zeros(rows, 1, dtype=torch.float64))


def outputs(rule: Rule, toy: Toy) -> list[float]:
    """The distribution over the first `LOOKAHEAD` tokens that a round and the target after it give."""
    kept, weights = accepted_odds(rule, toy), toy.weights
    following = [next_odds(rule, toy, n) for n in range(LOOKAHEAD + 1)]
    place = {path: row for row, path in enumerate(toy.paths)}
    total = [0.0] * len(toy.paths)
    for row, path in enumerate(toy.paths):
        for n in range(LOOKAHEAD + 1):
            for output in toy.paths:
                if output[:n] != path[:n]:
                    continue
                odds = float(weights[row] * kept[row, n])
                target = toy.p[place[output]]
                if n < LOOKAHEAD:
                    odds *= float(following[n][row, output[n]])
                for position in range(n + 1, LOOKAHEAD):
                    odds *= float(target[position, output[position]])
                total[place[output]] += odds
    return total


@pytest.mark.parametrize("kind", [{}, {"stops": True}, {"points": True}, {"stops": True, "points": True}], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_the_output_is_distributed_exactly_as_the_target_s_own(seed: int, kind: dict) -> None:
    """Also where drafts stop at a prefix that depends on their tokens."""
    case = toy(seed, **kind)
    expected = [case.probability(row) for row in range(len(case.paths))]
    assert outputs(block_verification, case) == pytest.approx(expected, abs=1e-9)


def test_a_loosened_block_is_seen_by_the_enumeration() -> None:
    """Negative control: a tenth more acceptance moves the distribution by far more than the tolerance."""

    def loosened(p: Tensor, tokens: Tensor, lengths: Tensor, q: Tensor | None, uniforms: Tensor | None):
        scales = torch.tensor([0.9] * LOOKAHEAD + [1.0], dtype=torch.float64)
        return block_verification(p, tokens, lengths, q, uniforms * scales)

    case = toy(0)
    errors = [abs(seen - case.probability(row)) for row, seen in enumerate(outputs(loosened, case))]
    assert max(errors) > 1e-3


def expected_by_token(toy: Toy) -> float:
    """Tokens that token verification keeps in expectation: sums of products of min(1, p / q)."""
    tokens = torch.tensor(toy.paths).unsqueeze(2)
    p, q = (probs[:, :LOOKAHEAD].gather(2, tokens).squeeze(2) for probs in (toy.p, toy.q))
    standing = (p / q).clamp(max=1.0).cumprod(dim=1)
    standing = standing * (torch.arange(LOOKAHEAD) < toy.lengths.unsqueeze(1))
    return float((toy.weights * standing.sum(dim=1)).sum())


def test_it_keeps_no_fewer_tokens_than_token_verification_and_mostly_more() -> None:
    """Exactly, on random pairs."""
    gains = []
    for seed in range(8):
        case = toy(seed, stops=seed % 2 == 1)
        kept = accepted_odds(block_verification, case) @ torch.arange(LOOKAHEAD + 1, dtype=torch.float64)
        gains.append(float((case.weights * kept).sum()) - expected_by_token(case))
    assert min(gains) > -1e-9 and sum(gain > 0.01 for gain in gains) >= 4


def test_one_draft_is_judged_as_by_token_verification() -> None:
    """With γ = 1 both rules are the same function, and without drafts both draw from the target."""
    torch.manual_seed(0)
    p, q = (torch.rand(200, n, 5, dtype=torch.float64).softmax(-1) for n in (2, 1))
    uniforms, tokens = torch.rand(200, 2, dtype=torch.float64), torch.randint(0, 5, (200, 1))
    for drafts in (0, 1):
        lengths = torch.full((200,), drafts)
        arguments = (p[:, : drafts + 1], tokens[:, :drafts], lengths, q[:, :drafts], uniforms[:, 1 - drafts :])
        block, token = block_verification(*arguments), speculative_sampling(*arguments)
        for name in ("n_accepted", "next_token", "overlap"):
            assert torch.equal(getattr(block, name), getattr(token, name))
        assert block.n_accepted.float().mean() <= drafts


def test_equal_distributions_keep_everything() -> None:
    case = toy(3)
    uniforms = torch.full((len(case.paths), LOOKAHEAD + 1), ALMOST_ONE, dtype=torch.float64)
    kept = block_verification(case.p, torch.tensor(case.paths), case.lengths, case.p[:, :LOOKAHEAD], uniforms)
    assert (kept.n_accepted == LOOKAHEAD).all()
