"""The target: never slower than the plain idiom.

Speed is measured by ``python -m benchmarks``, not by tests; this checks that no function escapes the measuring: each
has a benchmark with a target against the plain idiom, at a large size and at a tiny one.
"""

import math

import pytest

from benchmarks.registry import all_cases
from tests.laws.functions import FUNCTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("size", "fits"), [("large", lambda n: n >= 2**20), ("tiny", lambda n: n <= 64)])
def test_every_function_is_measured_against_its_idiom(name, size, fits):
    cases = [case for case in all_cases() if case.function == name and fits(math.prod(case.shape))]
    assert cases, f"{name} has no benchmark at a {size} size"
    for case in cases:
        assert any(side.kind == "peer" for side in case.sides), case.name
        assert case.targets, case.name
