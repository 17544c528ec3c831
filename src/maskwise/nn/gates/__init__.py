"""Gates: which weights of a layer are kept, by a fixed mask, by size, by structure, or learned."""

from __future__ import annotations

from maskwise.nn.gates.gate import Binary as Binary
from maskwise.nn.gates.gate import Gate as Gate
from maskwise.nn.gates.gate import Threshold as Threshold
from maskwise.nn.gates.learned import HardConcrete as HardConcrete
from maskwise.nn.gates.learned import Sigmoid as Sigmoid
from maskwise.nn.gates.selecting import NM as NM
from maskwise.nn.gates.selecting import Block as Block
from maskwise.nn.gates.selecting import Selecting as Selecting
from maskwise.nn.gates.selecting import TopK as TopK

__all__ = ["NM", "Binary", "Block", "Gate", "HardConcrete", "Selecting", "Sigmoid", "Threshold", "TopK"]
