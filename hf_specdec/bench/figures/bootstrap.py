"""95% intervals by scipy: the one bootstrap behind every interval of the reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_specdec.bench.records import Interval

# Below which no interval is given. An interval of a ratio ends at the least and the greatest of the examples' own
# ratios, at most. All of n examples lie on the same side of the median of what they are drawn from in 2^(1-n) of all
# cases: more often than 95% intervals may miss it if there are fewer than 6.
ENOUGH = 6
ONE_SIDED = 0.025  # the chance at each end of a 95% interval
_LEVEL = 0.95
RESAMPLES = 2000
_BOUND_DRAWS = 20_000  # the tail of a bound takes more than an interval's; equal examples are drawn at once
_MOST_AT_ONCE = 4_000_000  # numbers held in memory

# From the sums of each quantity, arrays of any shape, to the figure.
Figure = Callable[..., Any]
# cells[example][repeat] holds the quantities that a figure sums.
Cells = Sequence[Sequence[Sequence[float]]]


def interval(cells: Cells, figure: Figure) -> Interval | None:
    """A figure computed from sums over examples and repeats, with the percentile interval of a paired bootstrap.

    Examples are drawn with replacement, and for each one drawn its repeats: how answers differ counts as well as how
    the machine does. Each cell holds the numbers of both sides, so that they stay paired. Seeded: the same cells give
    the same interval. It is widened for few examples, see `_expanded`.

    Args:
        cells: see `Cells`; examples may have different numbers of repeats, at least 1.
        figure: of one positional argument for each quantity of a cell.

    Returns:
        None without cells; without ends below `ENOUGH` examples.
    """
    if not cells:
        return None
    quantities = len(cells[0][0])
    value = float(figure(*(sum(cell[i] for unit in cells for cell in unit) for i in range(quantities))))
    if len(cells) < ENOUGH:
        return Interval(value)
    from scipy.stats import bootstrap  # here because it takes a second

    counts = np.array([len(unit) for unit in cells])
    table = np.zeros((quantities, len(cells), counts.max()))
    for place, unit in enumerate(cells):
        table[:, place, : len(unit)] = np.array(unit).T
    draws = np.random.default_rng(0)

    def statistic(drawn: Any, axis: int = -1) -> Any:
        repeats = draws.random((*drawn.shape, table.shape[2])) * counts[drawn][..., None]
        # As many draws for each example as it has repeats.
        kept = np.arange(table.shape[2]) < counts[drawn][..., None]
        chosen = (column[drawn[..., None], repeats.astype(int)] * kept for column in table)
        return figure(*(column.sum((-2, -1)) for column in chosen))

    found = bootstrap(
        (np.arange(len(cells)),),
        statistic,
        n_resamples=RESAMPLES,
        batch=max(1, _MOST_AT_ONCE // table[0].size),
        vectorized=True,
        confidence_level=_expanded(len(cells)),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))


def _expanded(examples: int) -> float:
    """The level at which the percentile interval of so few examples is about as wide as Student's.

    Otherwise it is too narrow in two ways: it has the quantiles of a normal distribution, and the spread of a sample
    rather than the estimated one of what the sample is drawn from. Expanded percentiles: Hesterberg 2015, What
    Teachers Should Know About the Bootstrap, The American Statistician 69.
    """
    from scipy.stats import norm, t

    student = t.ppf((1 + _LEVEL) / 2, examples - 1)
    return float(1 - 2 * norm.sf(math.sqrt(examples / (examples - 1)) * student))


def lower_bound(cells: Cells, worst: float) -> float:
    """A lower bound, at 97.5%, of the mean of bounded values, for samples that may lack rare bad ones.

    Of Learned-Miller and Thomas 2019 (arXiv 1905.06208): the examples and one more, imagined, with the worst value are
    weighted at random, uniformly over all weights that sum to 1. A bootstrap of equal values has no width; this bound
    has. For values of two kinds it is Clopper and Pearson's; that it holds for others is their conjecture. Seeded.

    Args:
        cells: as of `interval`, one repeat each: (sum of values, their number).
        worst: the least value that is possible. The imagined example has as many as the examples on average.
    """
    examples = Counter(tuple(unit[0]) for unit in cells)
    size = sum(unit[0][1] for unit in cells) / len(cells)
    draws = np.random.default_rng(0)
    imagined = draws.standard_gamma(1, _BOUND_DRAWS)
    total, count = worst * size * imagined, size * imagined
    for (values, number), times in examples.items():
        weight = draws.standard_gamma(times, _BOUND_DRAWS)  # of so many equal examples together
        total, count = total + values * weight, count + number * weight
    return float(np.quantile(total / count, ONE_SIDED))
