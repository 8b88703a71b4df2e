"""What exists for GPUs only: kernels, several layers as one batch, CUDA graphs. Everything else reads as on a CPU."""
