"""Run the ``nnxmoe`` command as ``python -m nnxmoe``."""

from nnxmoe.apps.cli import command

command()
