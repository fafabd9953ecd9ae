"""Records the rewritten step into a CUDA graph and replays it.

In: rewritten regions and the tensors of a call. Out: replays that are safe for every call of the same signature.
"""
