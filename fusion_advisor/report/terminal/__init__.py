"""The report and traces as tables in a terminal."""
