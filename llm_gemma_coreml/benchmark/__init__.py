"""Measures a bundle's speed and memory, alone or against llama.cpp."""
