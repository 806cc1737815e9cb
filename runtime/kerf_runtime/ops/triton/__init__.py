"""Triton kernels behind the custom operators; imported only when an operator first runs on a GPU.

Every kernel reads its input once with accesses of 16 bytes where widths and strides allow it, computes in
float32, and rounds where the native form in ``kerf_runtime.ops`` rounds.
"""
