"""Text generation: the engine, sampling, drafts, grammars and scores."""
