"""The command ``maskwise``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line. This is the entry point that pip installs."""
    from maskwise.cli.app import app

    app()
