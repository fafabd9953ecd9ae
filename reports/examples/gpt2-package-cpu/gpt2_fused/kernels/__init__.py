"""The kernels, one file each."""
