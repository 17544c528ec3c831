"""Masked reductions."""

from __future__ import annotations

from maskwise.ops.reduce.exponentials import *
from maskwise.ops.reduce.extrema import *
from maskwise.ops.reduce.logical import *
from maskwise.ops.reduce.moments import *
from maskwise.ops.reduce.sums import *
