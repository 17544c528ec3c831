import pytest

from maskwise.models.compress import candidates
from maskwise.models.compress.candidates import Times


@pytest.fixture
def prefer(monkeypatch):
    """Let these forms win, in this order, whatever the clock says: which one is fastest is not what tests are about."""

    def set_order(*names):
        def time_calls(calls, seconds):
            order = {name: position + 1.0 for position, name in enumerate((*names, "dense"))}
            for call in calls.values():
                call()
            return {name: Times(order.get(name, 99.0), order.get(name, 99.0)) for name in calls}

        monkeypatch.setattr(candidates, "time_calls", time_calls)
        same = lambda calls, _: {name: Times(1.0, 1.0) for name in calls}
        monkeypatch.setattr("maskwise.models.compress.api.time_calls", same)

    return set_order
