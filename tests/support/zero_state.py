"""A state for the runtimes that tests make themselves."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llm_gemma_coreml.runtime.base import HostState


class ZeroState(HostState):
    """States of one package in host memory, fp16 as declared, zero when made."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__({name: np.zeros(shape, np.float16) for name, shape in shapes.items()})
