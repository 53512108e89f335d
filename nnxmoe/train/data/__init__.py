"""Training data: chats and texts of JSON lines, as packed batches that resume where a run stopped."""
