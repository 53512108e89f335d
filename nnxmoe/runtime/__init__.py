"""Runtime environment: processes, memory, compiled programs, log messages and progress bars."""
