"""Pieces that the commands share: parameter types, errors as one line, JSON output."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from llm_gemma_coreml.bundle.store import list_bundles
from llm_gemma_coreml.errors import GemmaCoreMLError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PICTURE_ENDINGS = (".png", ".svg", ".pdf")
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
        except BrokenPipeError:
            raise  # whoever read the output has enough: click ends quietly
        except OSError as error:
            raise click.ClickException(_describe(error)) from error

    return wrapped


def _describe(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


class CompletedName(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Any text; the shell completes it to one of the names that `names` gives when it is asked."""

    def __init__(self, name: str, names: Callable[[], Iterable[str]]) -> None:
        self.name = name
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.lower().startswith(incomplete.lower())]


class BundleName(CompletedName):
    """The name of an installed bundle."""

    def __init__(self) -> None:
        super().__init__("name", lambda: (bundle.name for bundle in list_bundles()))


class PicturePath(click.Path):  # type: ignore[type-arg, unused-ignore]
    """A file to draw to; its ending is looked at before anything is measured."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).suffix.lower() not in PICTURE_ENDINGS:
            self.fail(f"{str(value)!r} must end in {', '.join(PICTURE_ENDINGS)}", param, ctx)
        return super().convert(value, param, ctx)


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
