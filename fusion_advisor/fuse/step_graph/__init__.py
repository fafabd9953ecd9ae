"""Records both passes of a training step into CUDA graphs and replays them.

In: the two passes of a step, rewritten or not. Out: replays that are safe for every call, and whether they pay.
"""
