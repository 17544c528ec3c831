"""What the Triton kernels of all op families share: when they can run, how tensors are laid out, how they start.

Nothing here imports Triton but `maskwise.ops.gpu.triton`, which holds the functions that kernels call.
"""
