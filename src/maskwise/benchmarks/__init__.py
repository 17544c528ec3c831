"""The benchmarks: what Maskwise costs beside what people write today, measured in one process.

``maskwise bench`` runs them from any install. The parts, in the order in which they meet:

- :mod:`~maskwise.benchmarks.case`: what is compared with what, and what must hold (a value, no timing);
- :mod:`~maskwise.benchmarks.cases`: the cases, one file a family;
- :mod:`~maskwise.benchmarks.registry`: all of them, and how to pick some;
- :mod:`~maskwise.benchmarks.measure`: interleaved timing and its statistics (no torch);
- :mod:`~maskwise.benchmarks.run`: checks that the sides agree, then times them;
- :mod:`~maskwise.benchmarks.report` and :mod:`~maskwise.benchmarks.plot`: table, CSV, JSON and picture.
"""
