"""Convolutions that read what is valid, and compute what is wanted."""

from __future__ import annotations

from maskwise.ops.conv.arguments import Geometry as Geometry
from maskwise.ops.conv.arguments import Options as Options
from maskwise.ops.conv.arguments import geometry_of as geometry_of
from maskwise.ops.conv.arguments import line_up as line_up
from maskwise.ops.conv.arguments import seen_through as seen_through
from maskwise.ops.conv.arguments import wanted_by_default as wanted_by_default
from maskwise.ops.conv.conv import conv1d as conv1d
from maskwise.ops.conv.conv import conv2d as conv2d
from maskwise.ops.conv.conv import conv_transpose1d as conv_transpose1d
from maskwise.ops.conv.conv import conv_transpose2d as conv_transpose2d

__all__ = ["conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"]
