"""Plan the memory, time and network traffic of a model on a mesh without its devices: `nnxmoe.plan`."""
