"""What puts parts together: a layer, stacks of layers, the decoder, and the model around it."""
