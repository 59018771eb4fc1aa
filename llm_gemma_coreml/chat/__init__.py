"""Messages to token ids, and token ids to replies."""
