"""An HTTP server of one model, after the OpenAI API: ``nnxmoe serve``. Needs the extra ``serve``."""
