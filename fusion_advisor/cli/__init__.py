"""The command line: typer commands, one file each; consoles are built in console.py alone."""

from __future__ import annotations
