"""The command line: one file for each command; errors are caught once, in ``app``."""
