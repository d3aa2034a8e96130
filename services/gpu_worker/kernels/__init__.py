"""WGSL compute kernels and the module that completes them."""
