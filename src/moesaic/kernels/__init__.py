"""Matmul and elementwise kernels for CPUs and GPUs, and the devices that run them."""
