"""Tensors in, tensors out: the arithmetic of a step. Nothing here knows a request, a config or a protobuf message.

    layout.py      host arithmetic, numpy only; holds the host twin of every device metadata kernel, under the same name
    reference/     plain torch on any device: obviously right, and the CPU backend
    triton/        (GPU) the same module names, function names and signatures as reference/
    attention/     one plan/run interface over paged attention, and its backends

A kernel `reference/x.py::f` and its GPU form `triton/x.py::f` take the same arguments and write the same outputs, so
a caller picks the package once and calls either. Reference kernels never move a tensor to the host.
"""
