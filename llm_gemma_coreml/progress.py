"""Progress bars for slow work, on stderr only: stdout belongs to the answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, how much of it is done, how much there is); any unit, the same in both."""


_PLAIN = "{desc}: {percentage:3.0f}% |{bar:30}| {elapsed}"
_BYTES = "{desc}: {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}, {rate_fmt}, {remaining} left"


@contextmanager
def progress_bar(in_bytes: bool = False) -> Iterator[Progress]:
    """A callback that draws one bar per kind of work. Writes rarely if stderr is not a terminal.

    in_bytes: what is counted are bytes, and how many come each second is worth showing.
    """
    from tqdm import tqdm

    bar: tqdm[None] | None = None
    interval = 0.1 if sys.stderr.isatty() else 10.0

    def report(work: str, done: int, total: int) -> None:
        nonlocal bar
        if bar is None or bar.desc != work:
            if bar is not None:
                bar.close()
            bar = tqdm(
                total=total,
                desc=work,
                file=sys.stderr,
                mininterval=interval,
                unit="B",
                unit_scale=in_bytes,
                bar_format=_BYTES if in_bytes else _PLAIN,
            )
        bar.total = total
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
