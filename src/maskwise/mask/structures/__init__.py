"""The structures behind a Mask: each says which positions are kept, in as little memory as its pattern allows."""

from __future__ import annotations

from maskwise.mask.structures import affine as affine
from maskwise.mask.structures.affine import Affine
from maskwise.mask.structures.base import Operand, Structure
from maskwise.mask.structures.combination import Combination, Not
from maskwise.mask.structures.constant import Constant
from maskwise.mask.structures.dense import Dense
from maskwise.mask.structures.function import Function
from maskwise.mask.structures.indices import Indices
from maskwise.mask.structures.intervals import Intervals
from maskwise.mask.structures.segments import Segments
from maskwise.mask.structures.view import View

__all__ = [
    "Affine",
    "Combination",
    "Constant",
    "Dense",
    "Function",
    "Indices",
    "Intervals",
    "Not",
    "Operand",
    "Segments",
    "Structure",
    "View",
    "affine",
]
