"""What every test starts from: fixed seeds, poisoned memory, two threads, torch's defaults."""

from __future__ import annotations

import os
import random

import hypothesis
import numpy as np
import pytest
import torch

# The same examples on every run: a failure that CI sees is a failure that everyone sees. No deadline, because the
# first call of an op pays for imports and kernels.
hypothesis.settings.register_profile("maskwise", derandomize=True, deadline=None, max_examples=50, database=None)
# `pytest --hypothesis-profile=explore` looks further than a test run has time for.
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("maskwise")

# What torch's fill_uninitialized_memory is for its own allocations, this is for those of the kernels.
os.environ["MASKWISE_POISON"] = "1"

# Plans must not depend on what somebody measured on this machine.
os.environ["MASKWISE_CACHE_DIR"] = os.path.join(os.path.dirname(__file__), "no-such-directory")

if os.environ.get("MASKWISE_INTERPRET") == "1":
    # `make test-gpu`: the suites of ops meet the Triton kernels, run by Triton's interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.gpu import interpreter

    interpreter.install()


def pytest_collection_modifyitems(items):
    """Keep every MASKWISE_SHARE-th test: the interpreter takes ten minutes for all of them."""
    items[:] = items[:: int(os.environ.get("MASKWISE_SHARE", "1"))]


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    """Seed, poison, and put back whatever a test changed, so that no test depends on the one before.

    Uninitialised memory is NaN (or the largest integer): an op that forgets to write an element cannot pass by luck.
    Two threads, also on one core: the parallel paths of the kernels must run in tests.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
