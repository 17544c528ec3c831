"""The parts of ``examples/train_digits.py``: the recipes, one short class per gate, and the training loop."""
