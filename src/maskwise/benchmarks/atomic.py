"""Write a file whole or not at all, so that Ctrl-C leaves nothing half-written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path"]


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path beside ``path``; move it there when the block ends, drop it when the block raises.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "new" / "figures.csv"
    >>> with atomic_path(target) as temporary:
    ...     _ = temporary.write_text("a,b")
    >>> target.read_text()
    'a,b'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last: matplotlib and friends choose the format by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner may read; a result is an ordinary file.
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
