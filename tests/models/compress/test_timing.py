from itertools import cycle

import pytest

from maskwise.models.compress import candidates
from maskwise.plan import measure


@pytest.fixture
def takes(monkeypatch):
    """Let the calls take these seconds, one after the other; the list of those that were made."""

    def patch(*seconds):
        made, coming = [], cycle(seconds)

        def timer(call, times):
            made.append(next(coming))
            return made[-1] * times

        monkeypatch.setattr(measure, "clock_timer", lambda clock: timer)
        return made

    return patch


def test_a_call_with_noisy_times_gets_more_rounds_and_its_best_counts(takes):
    # Each call takes 3 seconds, except for every fifth, which nothing disturbs.
    made = takes(3.0, 3.0, 3.0, 3.0, 1.0)
    found = candidates.time_calls({"only": lambda: None}, 1.0)
    assert found["only"] == candidates.Times(1.0, 3.0)
    # One to find out how long a call takes, and three times the fewest rounds.
    assert len(made) == 1 + 3 * candidates.ROUNDS[0]


def test_steady_times_take_no_more_rounds_than_the_seconds_allow(takes):
    made = takes(1.0)
    assert candidates.time_calls({"only": lambda: None}, 10.0)["only"] == candidates.Times(1.0, 1.0)
    # One to find out how long a call takes, and ten rounds of a second.
    assert len(made) == 11
