"""Runs Core ML packages on ONNX Runtime: MIL programs are translated to ONNX once and cached."""

from llm_gemma_coreml.runtime.portable.loader import PortableRuntime

__all__ = ["PortableRuntime"]
