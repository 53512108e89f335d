"""nnxmoe: Mixtral, DeepSeek-V3 and Llama as flax.nnx modules."""
