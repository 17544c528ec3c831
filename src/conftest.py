"""Doctests: import the package before pytest imports its modules one by one, which would rebind ``maskwise.plan``."""

import maskwise  # noqa: F401
