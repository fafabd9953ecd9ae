"""Whether another layout of a step's values pays once kernels are made for it."""
