"""Training data: packed, resumable batches of chats and texts from JSON lines."""
