import pytest

from benchmarks.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Four processes, the first of which make the smaller groups: starting them costs more than what they run."""
    started = Ranks(4)
    yield started
    started.close()
