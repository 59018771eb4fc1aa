"""Runs Core ML packages on ONNX Runtime: MIL programs are translated to ONNX once and cached."""
