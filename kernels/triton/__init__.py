"""The reference kernels in Triton: the same module names, function names and signatures as `kernels.reference`.

Nothing imports this package but who runs on it: Triton is an optional dependency. Every launch is safe inside a
captured graph: lengths are read on the device, and nothing waits for the host. Under `TRITON_INTERPRET=1`, set before
Triton is first imported, the same code runs on CPU tensors. The interpreter gets bfloat16 arithmetic wrong, so every
kernel works in float32 between its loads and its stores.

Numbers that differ from step to step are not specialised, so that nothing is compiled while serving; strides of wide
rows are: only where the compiler knows one to be a multiple of 16 does it read 16 bytes at a time.
"""
