"""The command group `llm gemma-coreml`. Every llm command registers it, so a command's module is imported when it is used."""

from __future__ import annotations

from importlib import import_module

import click

_MODULES = {
    "download": "llm_gemma_coreml.download.command",
    "install": "llm_gemma_coreml.command_install",
    "convert": "llm_gemma_coreml.command_convert",
    "models": "llm_gemma_coreml.command_bundles",
    "info": "llm_gemma_coreml.command_bundles",
    "verify": "llm_gemma_coreml.command_verify",
    "bench": "llm_gemma_coreml.benchmark.command",
    "plan": "llm_gemma_coreml.planning.command",
    "remove": "llm_gemma_coreml.command_bundles",
    "default": "llm_gemma_coreml.command_bundles",
}
"""Command -> the module that has it as a function of that name."""


class _Commands(click.Group):
    """Finds its commands in `_MODULES`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        command: click.Command = getattr(import_module(_MODULES[cmd_name]), cmd_name)
        return command


@click.group("gemma-coreml", cls=_Commands)
def gemma_coreml() -> None:
    """Commands for working with Gemma Core ML bundles"""
