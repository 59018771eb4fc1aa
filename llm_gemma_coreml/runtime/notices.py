"""Notices of slow work that happens once, for whoever waits: one line each, to stderr unless set otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable

Notify = Callable[[str], None]


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_notify: Notify = _to_stderr


def notify(text: str) -> None:
    """Tell the user."""
    _notify(text)


def set_notify(function: Notify | None) -> None:
    """Send notices to `function` from now on; None: to stderr."""
    global _notify
    _notify = function or _to_stderr
