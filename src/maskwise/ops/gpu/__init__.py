"""What the Triton kernels of all op families share: geometry, launches, and device functions.

Only `maskwise.ops.gpu.triton`, with the device functions, imports Triton.
"""
