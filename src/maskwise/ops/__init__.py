"""The masked operations, one folder a family."""
