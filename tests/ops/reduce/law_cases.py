"""The reductions as loop bodies over kept values, for the law suites."""

SLICES = {
    "sum": lambda kept: kept.sum(),
}
