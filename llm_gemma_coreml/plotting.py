"""Empty figures for pictures of measurements and plans; matplotlib is optional."""

from __future__ import annotations

from typing import Any

from llm_gemma_coreml.errors import MissingDependencyError


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of that size in inches. Raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"Drawing needs matplotlib ({error}). Install it: pip install 'llm-gemma-coreml[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
