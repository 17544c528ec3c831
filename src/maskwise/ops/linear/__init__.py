"""Products with a weight of which only some is kept."""

from __future__ import annotations

from maskwise.ops.linear.cost import Product as Product
from maskwise.ops.linear.cost import dense_cost as dense_cost
from maskwise.ops.linear.cost import gpu_cost as gpu_cost
from maskwise.ops.linear.delegated import is_two_of_four as is_two_of_four
from maskwise.ops.linear.delegated import semi_structured as semi_structured
from maskwise.ops.linear.layouts import BLOCKS as BLOCKS
from maskwise.ops.linear.layouts import Block as Block
from maskwise.ops.linear.layouts import SparseLayout as SparseLayout
from maskwise.ops.linear.linear import linear as linear
from maskwise.ops.linear.sparse import DeferredLayout as DeferredLayout
from maskwise.ops.linear.sparse import decide_product as decide_product
from maskwise.ops.linear.sparse import is_sparse_promising as is_sparse_promising
from maskwise.ops.linear.sparse import multiply as multiply
from maskwise.ops.linear.sparse import product_routes as product_routes
from maskwise.ops.linear.sparse import sparse_linear as sparse_linear

__all__ = [
    "BLOCKS",
    "Block",
    "DeferredLayout",
    "Product",
    "SparseLayout",
    "decide_product",
    "dense_cost",
    "gpu_cost",
    "is_sparse_promising",
    "is_two_of_four",
    "linear",
    "multiply",
    "product_routes",
    "semi_structured",
    "sparse_linear",
]
