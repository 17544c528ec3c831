"""``maskwise draw``: masks from a small language of expressions."""
