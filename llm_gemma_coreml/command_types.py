"""Pieces that the commands share: parameter types, errors as one line, JSON output."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from llm_gemma_coreml.bundle.store import list_bundles
from llm_gemma_coreml.errors import GemmaCoreMLError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Errors of ours, and of the file system, become `Error: ...` and exit code 1."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except GemmaCoreMLError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            raise click.ClickException(_describe(error)) from error

    return wrapped


def _describe(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


class BundleName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The name of an installed bundle; the shell completes it."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(bundle.name) for bundle in list_bundles() if bundle.name.startswith(incomplete)]


class Counts(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Whole numbers, ascending, as `4096,32768`."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)
        if counts[0] < 1:
            self.fail(f"{value!r} has a number below 1", param, ctx)
        return counts


bundle_name = click.argument("name", type=BundleName())
as_json = click.option("as_json", "--json", is_flag=True, help="Write JSON to stdout")


def write_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
