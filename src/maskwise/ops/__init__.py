"""The masked operations, one folder a family. Importing it loads the C++ kernels."""

from __future__ import annotations

import maskwise.ops.extension
