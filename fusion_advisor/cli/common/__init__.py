"""What commands share: options, configuration files, consoles, progress, run directories, completion."""
