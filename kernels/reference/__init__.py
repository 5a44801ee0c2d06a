"""Every kernel in plain torch, on any device: what the GPU kernels are checked against, and what runs on a CPU."""
