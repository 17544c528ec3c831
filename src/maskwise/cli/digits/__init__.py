"""Train a small network on scikit-learn's digits to 95 % sparsity, with every gate."""

from __future__ import annotations
