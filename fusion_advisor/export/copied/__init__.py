"""Modules of which each exported package has a copy, as they are: they import the standard library and torch alone."""
