"""The machine: processes, memory, and messages to the person who waits."""
