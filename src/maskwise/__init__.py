"""Maskwise: mask-aware computing for PyTorch. What is masked out costs nothing and never leaks."""
