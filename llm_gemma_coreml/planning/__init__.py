"""What a model needs and how fast a device could run it, before anything is installed there."""
