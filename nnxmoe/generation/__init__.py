"""From token ids to more token ids, and text on both ends."""
