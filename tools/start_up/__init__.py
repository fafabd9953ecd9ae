"""Start-up and step time of what a run exports: ``python -m tools.start_up MODEL --to DIR``."""
