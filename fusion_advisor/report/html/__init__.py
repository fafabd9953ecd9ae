"""The HTML report: one file without network access."""
