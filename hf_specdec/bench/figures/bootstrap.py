"""95% intervals by scipy: the bootstrap used for every interval of the reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hf_specdec.bench.records import Interval

# The fewest examples with an interval. An interval of a ratio cannot reach beyond the smallest and the largest ratio
# of single examples. With probability 2^(1-n) all n examples lie on the same side of the population's median: with
# fewer than 6 that is more often than a 95% interval may miss it.
ENOUGH = 6
ONE_SIDED = 0.025  # the probability at each end of a 95% interval
_LEVEL = 0.95
RESAMPLES = 2000
_BOUND_DRAWS = 20_000  # more than for an interval, since a bound depends on the tail; equal examples share a draw
_MOST_AT_ONCE = 4_000_000  # most numbers held in memory

# Maps the sums of each quantity, arrays of any shape, to the figure.
Figure = Callable[..., Any]
# cells[example][repeat] holds the quantities to sum.
Cells = Sequence[Sequence[Sequence[float]]]


def interval(cells: Cells, figure: Figure) -> Interval | None:
    """Compute a figure from sums over examples and repeats, with the percentile interval of a paired bootstrap.

    Examples are drawn with replacement, and for each drawn example its repeats, so that the interval covers both the
    variation between answers and the machine's. Each cell holds the numbers of both sides, which keeps them paired.
    Seeded: the same cells give the same interval. It is widened for few examples, see `_expanded`.

    Args:
        cells: see `Cells`; each example has at least one repeat, and their numbers may differ.
        figure: takes one positional argument for each quantity of a cell.

    Returns:
        None without cells; an interval without ends below `ENOUGH` examples.
    """
    if not cells:
        return None
    quantities = len(cells[0][0])
    value = float(figure(*(sum(cell[i] for unit in cells for cell in unit) for i in range(quantities))))
    if len(cells) < ENOUGH:
        return Interval(value)
    from scipy.stats import bootstrap  # imported here since it takes a second

    counts = np.array([len(unit) for unit in cells])
    table = np.zeros((quantities, len(cells), counts.max()))
    for place, unit in enumerate(cells):
        table[:, place, : len(unit)] = np.array(unit).T
    draws = np.random.default_rng(0)

    def statistic(drawn: Any, axis: int = -1) -> Any:
        repeats = draws.random((*drawn.shape, table.shape[2])) * counts[drawn][..., None]
        # Each example's repeats are drawn as often as there are repeats.
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
    """The level at which the percentile interval of `examples` examples is about as wide as Student's.

    The plain interval is too narrow for two reasons: it uses the quantiles of a normal distribution, and the spread
    of the sample instead of an estimate of the population's. Expanded percentiles: Hesterberg 2015, What Teachers
    Should Know About the Bootstrap, The American Statistician 69.
    """
    from scipy.stats import norm, t

    student = t.ppf((1 + _LEVEL) / 2, examples - 1)
    return float(1 - 2 * norm.sf(math.sqrt(examples / (examples - 1)) * student))


def lower_bound(cells: Cells, worst: float) -> float:
    """A 97.5% lower bound of the mean of bounded values, for samples that may lack rare bad values.

    After Learned-Miller and Thomas 2019 (arXiv 1905.06208): the examples, and an imagined one with the worst value,
    get random weights, uniform over all weights that sum to 1. A bootstrap of equal values has no width; this bound
    has. For binary values it is Clopper and Pearson's; for others its validity is the authors' conjecture. Seeded.

    Args:
        cells: as in `interval`, with one repeat each: (sum of values, their number).
        worst: the smallest possible value. The imagined example has the average number of values.
    """
    examples = Counter(tuple(unit[0]) for unit in cells)
    size = sum(unit[0][1] for unit in cells) / len(cells)
    draws = np.random.default_rng(0)
    imagined = draws.standard_gamma(1, _BOUND_DRAWS)
    total, count = worst * size * imagined, size * imagined
    for (values, number), times in examples.items():
        weight = draws.standard_gamma(times, _BOUND_DRAWS)  # the total weight of `times` equal examples
        total, count = total + values * weight, count + number * weight
    return float(np.quantile(total / count, ONE_SIDED))
