"""What a model is: the fields of a config.json, checked. Knows no model by name, and computes nothing."""
