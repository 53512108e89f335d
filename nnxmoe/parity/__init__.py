"""An NNX and a Linen module side by side: what `nnxmoe.testing` is made of."""
