"""Times kernels of the library against eager, torch.compile and Liger, with the memory limit as the ruler.

In: the cases of a manifest. Out: ``BenchRow`` records and their plot.
"""
