"""Memory, time and network traffic of a model on a mesh, before any device is rented: `nnxmoe.plan`."""
