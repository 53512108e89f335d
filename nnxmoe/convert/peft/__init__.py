"""Save and load LoRA adapters in PEFT's format."""
