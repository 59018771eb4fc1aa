"""The command `llm gemma-coreml bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llm_gemma_coreml import catalog
from llm_gemma_coreml.command_types import Counts, PicturePath, as_json, bundle_name, one_line_errors, write_json

OURS = "llm_gemma_coreml.benchmark.ours"
LLAMA_CPP = "llm_gemma_coreml.benchmark.llamacpp"


@click.command()
@bundle_name
@as_json
@click.option("--contexts", type=Counts(), default="8,512,4096,16384", show_default=True, help="Depths")
@click.option("--prefills", type=Counts(), default="512,4096", show_default=True, help="Prompt lengths")
@click.option("--rows", type=Counts(), default="1,2,4,8", show_default=True, help="Rows per call")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--against", type=click.Choice(["llama.cpp"]), help="Measure another program in the same run")
@click.option(
    "--llama-cpp",
    type=click.Path(exists=True, path_type=Path),
    help="Directory with llama.cpp's shared libraries (or a program in it)",
)
@click.option("--gguf", type=click.Path(exists=True, path_type=Path), help="The model file for llama.cpp")
@click.option(
    "--llama-lookup",
    type=click.IntRange(1, 65535),
    nargs=2,
    default=(12, 48),
    show_default=True,
    help="With --speculation: tokens that llama.cpp looks up, and most that it drafts (its own defaults)",
)
@click.option("--plot", type=PicturePath(), help="Draw the figures to this file")
@click.option("--speculation", is_flag=True, help="Speculative against plain decoding, by kind of text")
@click.option(
    "--texts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the texts for --speculation (tests/data of the source code)",
)
@one_line_errors
def bench(name: str, as_json: bool, speculation: bool, plot: Path | None, **settings: Any) -> None:
    """Measure speed and memory of the bundle NAME on this machine"""
    bundle = catalog.installed_bundle(name)
    if speculation:
        _bench_speculation(bundle.path, settings, as_json, plot)
        return
    from llm_gemma_coreml.benchmark import report

    figures = _bench_speed(bundle.name, bundle.path, settings)
    _show(report, figures, as_json, plot)


def _bench_speed(name: str, bundle: Path, settings: dict[str, Any]) -> dict[str, Any]:
    from contextlib import ExitStack

    from llm_gemma_coreml.benchmark import report, run
    from llm_gemma_coreml.benchmark.side import Side, SideProcess
    from llm_gemma_coreml.progress import progress_bar

    plan = run.Plan(
        prefills=settings["prefills"],
        depths=settings["contexts"],
        rows=settings["rows"],
        repeats=settings["repeats"],
        threads=settings["threads"],
    )
    last = [str(plan.threads), str(plan.context())]
    processes = [SideProcess(name, OURS, [str(bundle), *last])]
    if settings["against"]:
        directory, model = _llama_cpp(settings["llama_cpp"], settings["gguf"])
        processes.append(SideProcess("llama.cpp", LLAMA_CPP, [str(directory), str(model), *last]))
    with ExitStack() as stack, progress_bar() as progress:
        sides: dict[str, Side] = {side.name: stack.enter_context(side) for side in processes}
        figures = run.measure(sides, plan, progress)
    if len(processes) == 2:
        ours, other = figures["sides"].values()
        figures["ratios"] = report.ratios(ours, other)
    return figures


def _llama_cpp(program: Path | None, model: Path | None) -> tuple[Path, Path]:
    if program is None or model is None:
        raise click.UsageError("--against llama.cpp needs --llama-cpp PATH and --gguf FILE.")
    return (program if program.is_dir() else program.parent), model


def _bench_speculation(bundle: Path, settings: dict[str, Any], as_json: bool, plot: Path | None) -> None:
    from llm_gemma_coreml.benchmark import speculation
    from llm_gemma_coreml.benchmark.llamacpp_lookup import opener
    from llm_gemma_coreml.progress import progress_bar

    rival = None
    if settings["against"]:
        directory, model = _llama_cpp(settings["llama_cpp"], settings["gguf"])
        rival = opener(directory, model, settings["threads"], settings["llama_lookup"])
    texts, repeats, threads = settings["texts"], settings["repeats"], settings["threads"]
    with progress_bar() as progress:
        figures = speculation.run(bundle, texts, repeats, progress=progress, threads=threads, rival=rival)
    _show(speculation, figures, as_json, plot)


def _show(reporter: Any, figures: dict[str, Any], as_json: bool, plot: Path | None) -> None:
    """Print the figures and draw them; `reporter` is the module that renders and draws its own kind."""
    if as_json:
        write_json(figures)
    else:
        click.echo(reporter.render(figures))
    if plot is not None:
        reporter.draw(figures, plot)
