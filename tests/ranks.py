"""Three ranks for the tests of a file: ``from tests.ranks import ranks``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.ranks import Ranks

__all__ = ["ranks"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Three processes on gloo."""
    made = Ranks(3)
    yield made
    made.close()
