"""Code shared by several families: tables of weight names, decoders with experts, and layer variants."""
