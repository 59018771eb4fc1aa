"""Runtimes: run one function of one package over a state."""
