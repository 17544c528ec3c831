"""Softmax and friends over what is kept: functions that map slices to slices."""

from __future__ import annotations

from maskwise.ops.softmax.normalize import *
from maskwise.ops.softmax.softmax import *
