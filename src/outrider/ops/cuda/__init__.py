"""The decoder's arithmetic on an NVIDIA GPU, by Triton kernels. Imported only where a GPU serves.

`kernels` and `place` have the layers, `choice` the sampling, `penalty_kernels` and `penalties` sampling with penalties and
filters, `tiles` the table of tile sizes, and `launch` the calls from torch tensors.
"""
