"""Verdicts on a training step: its gradients beside the graph's own ops, and its time with a change and without."""
