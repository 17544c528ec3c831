"""Tests in interpreted/ need kernels that run by Triton's interpreter, which is a process of its own."""

from maskwise.ops.backends import INTERPRETED

collect_ignore = [] if INTERPRETED else ["interpreted"]
