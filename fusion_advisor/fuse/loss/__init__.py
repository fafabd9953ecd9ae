"""A linear layer and its cross-entropy without the logits of all rows: how it is found, put in and computed."""
