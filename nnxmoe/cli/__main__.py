"""``python -m nnxmoe.cli``: the command ``nnxmoe``."""

from nnxmoe.cli.parser import command

command()
