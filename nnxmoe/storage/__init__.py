"""Bytes on disk and on the hub: reading and writing files safely. Knows no model."""
