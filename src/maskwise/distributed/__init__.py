"""Training on many ranks: process groups of torch.distributed, and nothing of our own beside them."""
