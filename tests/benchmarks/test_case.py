import pytest

from benchmarks.case import Case, Side, at_least, at_most, never_slower, within


def side(name, kind="peer"):
    return Side(name, lambda inputs: lambda: inputs, kind)


def case(*sides, **more):
    return Case("family", "fn", "variant", lambda case: 0, sides, **more)


@pytest.mark.parametrize(
    ("target", "ratio", "difference", "holds"),
    [
        (at_least(15, "best peer"), 15.1, -1.0, True),
        (at_least(15, "best peer"), 14.9, -1.0, False),
        (at_most(2, "floor"), 0.51, 1.0, True),
        (at_most(2, "floor"), 0.49, 1.0, False),
        (within(0.060, "import torch"), 0.9, 0.059, True),
        (within(0.060, "import torch"), 0.9, 0.061, False),
        (never_slower(), 0.96, 1.0, True),
        (never_slower(), 0.94, 1.0, False),
        (never_slower(), 0.50, 4e-6, True),
    ],
)
def test_a_target_holds_up_to_its_bound_and_no_further(target, ratio, difference, holds):
    assert target.holds(ratio=ratio, difference=difference) is holds


def test_a_case_needs_exactly_one_side_that_is_ours():
    with pytest.raises(ValueError, match="have one side of kind 'ours'"):
        case(side("a"), side("b"))
    with pytest.raises(ValueError, match="have one side of kind 'ours'"):
        case(side("a", "ours"), side("b", "ours"))


def test_two_sides_may_not_share_a_name():
    with pytest.raises(ValueError, match="distinct names"):
        case(side("a", "ours"), side("a"))


def test_a_target_must_name_a_side_of_its_case():
    with pytest.raises(ValueError, match=r"must name a side, .* got 'floor'"):
        case(side("a", "ours"), targets=(at_most(2, "floor"),))


def test_a_shrunken_case_is_small_and_judges_nothing():
    large = case(side("a", "ours"), side("b"), shape=(4096, 8), targets=(never_slower(),))
    assert large.shrunk().shape == (32, 8)
    assert large.shrunk().targets == ()
    assert large.shrunk().name == large.name
