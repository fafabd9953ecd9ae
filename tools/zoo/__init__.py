"""Models that nobody tuned to: forty and more architectures, each run by the command line in a process of its own.

In: names of workloads, a size and a number of layers. Out: a folder of runs, one table of them (JSON and markdown), a picture.
"""
