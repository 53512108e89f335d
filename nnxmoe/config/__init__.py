"""Fields of a config.json, validated. Knows no model by name, and computes nothing."""
