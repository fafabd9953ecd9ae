"""Products of a training step whose rows are padded: how they are padded, and whether a pass is faster so."""
