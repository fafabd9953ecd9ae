"""Graphs that train: the forward and the backward pass rewritten apart, judged together by their gradients and their time."""
