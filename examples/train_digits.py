"""Train a small network on scikit-learn's digits to 95 % sparsity, with every gate of Maskwise.

    pip install 'maskwise[examples]'
    python examples/train_digits.py                  # about a minute: a table, and train_digits.png
    python examples/train_digits.py --quick          # does everything run?

The recipes, one short class per gate, are in `maskwise.cli.digits.recipes`. ``maskwise demo --train`` is the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from maskwise.cli.digits.command import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny network")
    parser.add_argument("--plot", type=Path, default=Path("train_digits.png"), help="the file to write the plot to")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    sys.exit(run(quick=options.quick, plot=options.plot, json=options.json))
