"""The command ``nnxmoe``: its parser, its commands, and how it ends."""

from nnxmoe.cli.parser import command as command
from nnxmoe.cli.parser import main as main
