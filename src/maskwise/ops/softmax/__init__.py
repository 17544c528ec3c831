"""Masked softmax and normalization: functions that map slices to slices."""

from __future__ import annotations

from maskwise.ops.softmax.normalize import *
from maskwise.ops.softmax.softmax import *
