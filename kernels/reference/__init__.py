"""Plain torch kernels: obviously right, and the CPU backend."""
