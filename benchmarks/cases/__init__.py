"""The benchmark cases, one file a family of functions."""
