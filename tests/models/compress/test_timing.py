from itertools import chain, count, cycle, repeat

from maskwise.models.compress import candidates


def test_a_call_with_noisy_times_gets_more_rounds_and_its_best_counts(monkeypatch):
    # Each call takes 3 seconds, except for every fifth, which nothing disturbs.
    took = cycle([3.0, 3.0, 3.0, 3.0, 1.0])
    monkeypatch.setattr(candidates, "_elapsed", lambda call, repeats: next(took))
    calls = count()
    found = candidates.time_calls({"only": lambda: next(calls)}, 1.0)
    assert found["only"] == candidates.Times(1.0, 3.0)


def test_steady_times_take_no_more_rounds_than_the_seconds_allow(monkeypatch):
    repeated = []
    took = chain(repeat(1.0, 3), repeat(1.0))
    monkeypatch.setattr(candidates, "_elapsed", lambda call, repeats: repeated.append(repeats) or next(took))
    assert candidates.time_calls({"only": lambda: None}, 10.0)["only"] == candidates.Times(1.0, 1.0)
    # Three to find out how long a call takes, and ten rounds of a second.
    assert len(repeated) == 13
