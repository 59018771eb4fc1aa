"""The command `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llm_gemma_coreml.command_types import CompletedName, Counts, PicturePath, as_json, one_line_errors, write_json

if TYPE_CHECKING:
    from llm_gemma_coreml.planning.devices import Device
    from llm_gemma_coreml.planning.shapes import ModelShape


def _models() -> list[str]:
    from llm_gemma_coreml.planning.sources import plannable

    return plannable()


def _devices() -> tuple[str, ...]:
    from llm_gemma_coreml.planning.devices import device_names

    return device_names()


@click.command()
@click.argument("name", type=CompletedName("name", _models))
@click.option(
    "--device",
    type=CompletedName("device", _devices),
    default="this machine",
    show_default=True,
    help="M1 to M5 Max, an iPhone, this machine",
)
@click.option("--contexts", type=Counts(), help="Rungs of a bundle that is still to be converted")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits per weight of such a bundle; default: by the model's size")
@click.option("--target", type=click.Choice(["mac", "iphone"]), default="mac", help="As for convert; of such a bundle too")
@click.option("--compare", is_flag=True, help="Show what others measured beside what this model of a step says")
@click.option("--plot", type=PicturePath(), help="Draw the plan into this file (png, svg, pdf)")
@as_json
@one_line_errors
def plan(
    name: str, device: str, contexts: Any, bits: str | None, target: str, compare: bool, plot: Path | None, as_json: bool
) -> None:
    """Show what the model NAME needs and how fast it could be on a device

    NAME is an installed bundle, a model of the catalogue, or a model that has not been converted yet. Every figure is
    marked: computed, measured or published.
    """
    from llm_gemma_coreml.planning import facts, report
    from llm_gemma_coreml.planning.devices import find_device
    from llm_gemma_coreml.planning.published_runs import comparisons
    from llm_gemma_coreml.planning.sources import find_shape

    found = find_device(device)
    shape = find_shape(name, contexts, None if bits is None else int(bits), target)
    figures = facts.plan(shape, found)
    if plot is not None:
        from llm_gemma_coreml.planning.picture import draw

        draw(figures, plot)
    pairs = comparisons() if compare else []
    if as_json:
        write_json({**figures, **({"compared": [pair.as_dict() for pair in pairs]} if compare else {})})
        return
    click.echo(report.render(figures))
    if shape.layout == "published":
        click.echo("\n" + _explain(shape, found))
    if compare:
        click.echo("\n" + report.render_comparisons(pairs))


def _explain(shape: ModelShape, device: Device) -> str:
    """Why the published layout is slow: its model in our layout is the other side of the comparison."""
    from llm_gemma_coreml.planning.report import why_far_from_the_floor
    from llm_gemma_coreml.planning.sources import published_model_in_our_layout

    return why_far_from_the_floor(shape, device, published_model_in_our_layout())
