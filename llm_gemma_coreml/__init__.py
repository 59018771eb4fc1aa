"""Run Gemma from Core ML packages, on a Mac and off it. Importing this package imports nothing heavy."""
