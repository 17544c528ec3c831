import pytest

from maskwise.models.compress import choosing
from maskwise.models.compress.timing import Times


@pytest.fixture
def prefer(monkeypatch):
    """Let these forms win, in this order, whatever the clock says: which one is fastest is not what tests are about."""

    def set_order(*names):
        def measured(ways, seconds):
            order = {name: position + 1.0 for position, name in enumerate((*names, "dense"))}
            for way in ways.values():
                way()
            return {name: Times(order.get(name, 99.0), order.get(name, 99.0)) for name in ways}

        monkeypatch.setattr(choosing, "measured", measured)
        monkeypatch.setattr("maskwise.models.compress.api.measured", lambda ways, _: {n: Times(1.0, 1.0) for n in ways})

    return set_order
