"""Shared by all commands: options, configuration files, consoles, progress, run directories, completion."""
