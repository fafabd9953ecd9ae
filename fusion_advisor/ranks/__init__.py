"""Several processes, one model: what torchrun starts.

In: the environment of a rank. Out: a process group whose ranks run the same step in the same order, decide by the same numbers,
end together, and write one report. Only the command line imports this folder, and only under torchrun.
"""
