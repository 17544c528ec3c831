"""All rows."""

from __future__ import annotations

from tests.errors import audits, commands, functions, layers, masks, selection, whole_models, windows

ROWS = [
    row for part in (masks, functions, selection, layers, whole_models, windows, audits, commands) for row in part.ROWS
]
