"""Generators of documents: each makes pages of docs/ from the code or from committed results (see the Makefile)."""
