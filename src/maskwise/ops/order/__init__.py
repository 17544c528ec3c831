"""The order of what is kept."""

from __future__ import annotations

from maskwise.ops.order.ranks import *
from maskwise.ops.order.sorting import *
