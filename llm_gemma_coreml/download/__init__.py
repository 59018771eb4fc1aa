"""Fetching models from a hub: what is there, resumable transfers, installation as a whole."""
