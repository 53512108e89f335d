"""``python -m nnxmoe``: the command ``nnxmoe``."""

from nnxmoe.apps.cli import command

command()
