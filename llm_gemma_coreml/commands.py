"""The command group `llm gemma-coreml`. Each command has a module; everything slow is imported when it runs."""

from __future__ import annotations

import click

from llm_gemma_coreml import command_bundles
from llm_gemma_coreml.benchmark.command import bench
from llm_gemma_coreml.command_convert import convert
from llm_gemma_coreml.command_install import install
from llm_gemma_coreml.command_verify import verify
from llm_gemma_coreml.download.command import download
from llm_gemma_coreml.planning.command import plan


@click.group("gemma-coreml")
def gemma_coreml() -> None:
    """Commands for working with Gemma Core ML bundles"""


for command in (
    download,
    install,
    convert,
    command_bundles.models,
    command_bundles.info,
    verify,
    bench,
    plan,
    command_bundles.remove,
    command_bundles.default,
):
    gemma_coreml.add_command(command)
