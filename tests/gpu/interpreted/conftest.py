"""Launches are cached with the plans, and tests change what they are computed from: each starts without any."""

from collections.abc import Iterator

import pytest

from maskwise.plan import dispatch


@pytest.fixture(autouse=True)
def _no_cached_launches() -> Iterator[None]:
    dispatch.invalidate()
    yield
    dispatch.invalidate()
