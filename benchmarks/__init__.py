"""The benchmarks: what Maskwise costs beside what people write today, measured in one process.

``python -m benchmarks`` (or ``make bench``) runs them, from the root of the repository. The parts:

- :mod:`~benchmarks.case`: what is compared with what, and what must hold (a value, no timing);
- :mod:`~benchmarks.cases`: the cases, one file per family;
- :mod:`~benchmarks.registry`: all of them, and how to select some;
- :mod:`~benchmarks.run`: checks that the sides agree, then times them with :mod:`maskwise.plan.measure`;
- :mod:`~benchmarks.report` and :mod:`~benchmarks.plot`: table, CSV, JSON and picture;
- :mod:`~benchmarks.command`: the command line;
- :mod:`~benchmarks.compare`: two versions of maskwise instead of two sides.
"""
