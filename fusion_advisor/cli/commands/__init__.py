"""One file for each command: its options, and the call into ``cli.common`` that does the work."""
