from itertools import chain, count, cycle, repeat

from maskwise.models.compress import timing


def test_a_way_that_is_disturbed_gets_more_rounds_and_its_best_counts(monkeypatch):
    # Each call takes 3 seconds, but for every fifth, which nobody disturbs.
    took = cycle([3.0, 3.0, 3.0, 3.0, 1.0])
    monkeypatch.setattr(timing, "_took", lambda way, calls: next(took))
    calls = count()
    found = timing.measured({"only": lambda: next(calls)}, 1.0)
    assert found["only"] == timing.Times(1.0, 3.0)


def test_what_is_steady_gets_no_more_rounds_than_asked(monkeypatch):
    asked = []
    took = chain(repeat(1.0, 3), repeat(1.0))
    monkeypatch.setattr(timing, "_took", lambda way, calls: asked.append(calls) or next(took))
    assert timing.measured({"only": lambda: None}, 10.0)["only"] == timing.Times(1.0, 1.0)
    # Three to find out how long a call takes, and ten rounds of a second.
    assert len(asked) == 13
