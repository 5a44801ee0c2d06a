"""The Triton kernels against their references: on a GPU where there is one, else under Triton's interpreter."""
