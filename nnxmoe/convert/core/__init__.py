"""The layout core: which arrays make up each external tensor, and one planner, filler and list of faults for all
formats."""
