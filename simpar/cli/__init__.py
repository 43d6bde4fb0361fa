"""The ``simpar`` command: job files and flags in, reports and files out."""

from simpar.cli.app import main

__all__ = ["main"]
