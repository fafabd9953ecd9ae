"""Training, generate and trace files: profiled only, nothing is rewritten."""
