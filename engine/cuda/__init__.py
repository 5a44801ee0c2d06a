"""What the channel needs of CUDA beyond torch: memory another process can open, and flags that a stream waits on."""
