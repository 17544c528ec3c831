"""Run the kernel tests in this process, after making sure that the sanitized extension is what they will meet.

`make test-sanitize` starts this with the sanitizer runtimes preloaded. A run that silently took the ordinary extension
would prove nothing, so that is checked first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Check the extension, then hand over to pytest."""
    import pytest

    from maskwise.ops import backends

    status = backends.status()
    wanted = os.environ["MASKWISE_EXTENSION"]
    assert status.loaded, status
    assert status.path is not None
    assert Path(status.path).samefile(wanted), f"{status.path} is loaded, not {wanted}"
    binary = Path(wanted).read_bytes()
    assert b"__asan_init" in binary, f"{wanted} was built without AddressSanitizer"
    assert b"__ubsan_handle" in binary, f"{wanted} was built without UndefinedBehaviorSanitizer"
    # A report is written straight to the file descriptor just before the process dies: pytest must not hold it back,
    # and faulthandler must not take its place.
    quiet = ["--capture=sys", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    return pytest.main(["-m", "kernel", *quiet, *(arguments or ["tests"])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
