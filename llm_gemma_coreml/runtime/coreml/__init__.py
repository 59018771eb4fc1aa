"""Runs Core ML packages with Core ML itself, on a Mac, through coremltools' Python API."""

from llm_gemma_coreml.runtime.coreml.loader import CoreMLRuntime

__all__ = ["CoreMLRuntime"]
