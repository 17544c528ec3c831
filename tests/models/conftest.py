"""What tests of models share."""

import pytest

import maskwise as mw


@pytest.fixture
def without_tokenwise():
    """Adapters without that which serves linear layers only."""
    every = mw.models.adapters()
    for name in every:
        mw.models.unregister(name)
    for adapter in reversed(every.values()):
        if not getattr(adapter, "is_fallback", False):
            mw.models.register(adapter)
    yield
    for name in mw.models.adapters():
        mw.models.unregister(name)
    for adapter in reversed(every.values()):
        mw.models.register(adapter)
