"""Kernels of other libraries and our own, one backend a file; imported only where chosen."""
