"""The ``dsaccum`` command. Nothing heavy is imported before a command's arguments have been found right."""

from dsaccum.cli.app import main

__all__ = ["main"]
