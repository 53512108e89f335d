"""Training data: chats and texts in JSON lines, as packed and resumable batches."""
