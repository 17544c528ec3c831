"""Targets for the geometric mean of several cases."""

import pytest

from benchmarks import means
from benchmarks.registry import all_cases


@pytest.mark.parametrize("mean", means.MEANS, ids=lambda mean: mean.text)
def test_every_mean_is_about_the_five_shapes_of_the_registry(mean):
    sides = [(case.name, side.name, 2.0) for case in all_cases() for side in case.sides]
    names = [case for case, side, _ in sides if side == mean.side and mean.of([(case, side, 2.0)]) is not None]
    assert len(names) == len(set(names)) == 5
    assert mean.of(sides) == pytest.approx(2.0)


def test_a_mean_below_its_factor_is_missed_and_one_that_was_not_measured_is_not_judged():
    measured = {"1x2x3": 2.0, "4x5x6": 8.0}
    ratios = [(f"SparseLinear {shape} keep=5%", "F.linear, dense", ratio) for shape, ratio in measured.items()]
    ((mean, value, holds),) = means.judged(ratios)
    assert (mean.ending, holds) == ("keep=5%", False)
    assert value == pytest.approx(4.0)
