"""The decoder's arithmetic on an NVIDIA GPU, by Triton kernels. Imported only where a GPU serves.

`matrix` has the forms of matrices and their products, `quantised_matrix` and `quantised` those of quantised ones. `kernels` and
`place` have the layers, `router` and `experts` mixtures of experts, `attention` attention, which is cut as `segments` says,
`recurrence` the gated delta rule, `choice` the sampling, `penalty_kernels` and `penalties` sampling with penalties and filters,
`trees` the growth of draft trees, `tiles` and `quantised_tiles` the tables of tile sizes; `launch`, `experts_launch`,
`attention_launch`, `recurrence_launch` and `tree_launch` call them from torch tensors.
"""
