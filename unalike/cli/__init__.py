"""The command `unalike`."""

from unalike.cli.commands import app, main

__all__ = ["app", "main"]
