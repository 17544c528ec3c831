"""A pytest plugin: every process that runs tests must meet the sanitized extension.

`make test-sanitize` loads it with the sanitizer runtimes preloaded. A run that silently took the ordinary extension
would prove nothing, so each worker checks that first.
"""

from __future__ import annotations

import os
from pathlib import Path


def pytest_configure() -> None:
    """Check the extension of this process before it collects a test."""
    from maskwise.ops import backends

    status = backends.status()
    wanted = os.environ["MASKWISE_EXTENSION"]
    assert status.loaded, status
    assert status.path is not None
    assert Path(status.path).samefile(wanted), f"{status.path} is loaded, not {wanted}"
    binary = Path(wanted).read_bytes()
    assert b"__asan_init" in binary, f"{wanted} was built without AddressSanitizer"
    assert b"__ubsan_handle" in binary, f"{wanted} was built without UndefinedBehaviorSanitizer"
