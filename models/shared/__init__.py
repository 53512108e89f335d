"""Parts that several families share: name tables, decoders with experts, and layer variants."""
