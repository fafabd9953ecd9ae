"""Memory of a training step: losses without the logits of all rows, a budget for activations, and its peak."""
