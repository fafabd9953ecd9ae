"""One file for each command: its options, and the call of what does the work."""
