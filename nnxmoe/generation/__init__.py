"""Text generation: engine, sampling, drafts, grammars and scores."""
