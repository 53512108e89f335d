"""HTTP server for one model with the OpenAI API: ``nnxmoe serve``. Requires the ``serve`` extra."""
