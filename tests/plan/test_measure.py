"""The statistics on clocks that do as they are told: no real time passes here."""

import random

import pytest

from maskwise.plan.measure import Samples, Spread, measure, spread


class FakeTime:
    """A clock that moves only when a side says how long it took."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def side(self, name, *seconds):
        """A call that takes each of the times in turn, then the last one for ever."""
        remaining = list(seconds)

        def call():
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.log.append(name)

        return call


@pytest.fixture
def time():
    return FakeTime()


def test_a_ratio_is_the_other_sides_time_over_ours(time):
    samples = measure({"ours": time.side("ours", 0.002), "peer": time.side("peer", 0.030)}, clock=time)
    assert samples.ratio("peer", "ours").median == pytest.approx(15)
    assert samples.ratio("ours", "ours") == Spread(1, 1, 1)
    assert samples.difference("peer", "ours") == pytest.approx(-0.028)


def test_ratios_are_taken_within_a_round_so_that_a_slow_spell_hits_both_sides():
    samples = Samples({"ours": [1.0, 10.0, 1.0], "peer": [2.0, 20.0, 2.0]})
    assert samples.ratio("peer", "ours") == Spread(2, 2, 2)
    assert samples.median("peer") == 2.0
    assert samples.best("peer") == 2.0


def test_short_calls_are_repeated_until_a_sample_lasts_long_enough(time):
    samples = measure({"ours": time.side("ours", 1e-6)}, clock=time, rounds=(1, 1), sample_seconds=1e-3)
    # One warm-up call, 1 + 2 + ... + 1024 calls of doubling, then one sample of 1024.
    assert len(time.log) == 1 + 2047 + 1024
    assert samples.seconds["ours"] == [pytest.approx(1e-6)]


def test_the_first_call_does_not_count(time):
    samples = measure({"ours": time.side("ours", 100.0, 0.002)}, clock=time, rounds=(3, 3))
    assert samples.seconds["ours"] == pytest.approx([0.002] * 3)


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 8), (100.0, 5), (0.002, 40)])
def test_the_budget_chooses_the_rounds_within_bounds(time, seconds, expected):
    samples = measure({"ours": time.side("ours", seconds)}, clock=time, budget=8.0, rounds=(5, 40))
    assert len(samples.seconds["ours"]) == expected


def test_every_round_runs_every_side_once_in_an_order_that_changes(time):
    names = ["a", "b", "c"]
    sides = {name: time.side(name, 0.01) for name in names}
    measure(sides, clock=time, rounds=(20, 20), order=random.Random(3))
    warm_up = 2 * len(names)
    rounds = [tuple(time.log[i : i + 3]) for i in range(warm_up, len(time.log), 3)]
    assert len(rounds) == 20
    assert all(sorted(order) == names for order in rounds)
    assert len(set(rounds)) > 3


def test_progress_is_told_after_every_round(time):
    told = []
    measure({"a": time.side("a", 1.0)}, clock=time, rounds=(3, 3), on_round=lambda *seen: told.append(seen))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_one_value_is_its_own_spread():
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)


def test_an_error_of_a_side_is_not_swallowed(time):
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure({"ours": time.side("ours", 1.0), "peer": broken}, clock=time)
