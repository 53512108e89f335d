"""``python -m nnxmoe.cli``: the command ``nnxmoe``."""

from nnxmoe.cli import command

command()
