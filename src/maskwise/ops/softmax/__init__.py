"""Functions that rescale each slice by what it keeps: softmax and friends, normalize, standardize."""

from __future__ import annotations

from maskwise.ops.softmax.api import log_softmax as log_softmax
from maskwise.ops.softmax.api import normalize as normalize
from maskwise.ops.softmax.api import softmax as softmax
from maskwise.ops.softmax.api import softmin as softmin
from maskwise.ops.softmax.api import standardize as standardize

__all__ = ["log_softmax", "normalize", "softmax", "softmin", "standardize"]
