"""The decoder's arithmetic on an NVIDIA GPU, by Triton kernels. Imported only where a GPU serves.

`kernels` holds the layers, `choice` what follows the logits, `tiles` the table of tile sizes, `launch` their
calls from torch tensors.
"""
