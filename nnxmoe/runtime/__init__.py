"""The machine that a program runs on: processes, memory, messages and progress bars."""
