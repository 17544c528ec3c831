"""Products with a weight of which only some is kept."""

from __future__ import annotations

from maskwise.ops.linear.api import linear as linear
from maskwise.ops.linear.layouts import BLOCKS as BLOCKS
from maskwise.ops.linear.layouts import Block as Block
from maskwise.ops.linear.layouts import SparseLayout as SparseLayout
from maskwise.ops.linear.registered import Indices as Indices
from maskwise.ops.linear.registered import sparse_linear as sparse_linear
from maskwise.ops.linear.registered import with_indices as with_indices
from maskwise.ops.linear.routes import Sizes as Sizes
from maskwise.ops.linear.routes import choose as choose

__all__ = ["BLOCKS", "Block", "Indices", "Sizes", "SparseLayout", "choose", "linear", "sparse_linear", "with_indices"]
