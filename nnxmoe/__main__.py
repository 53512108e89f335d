"""``python -m nnxmoe``: the command ``nnxmoe``."""

from nnxmoe.cli import command

command()
