"""The text of thought channels as it streams: the channel's name and white space at the borders are no thoughts."""

from __future__ import annotations

import re

_NAME = re.compile(r"[a-z_]{1,24}\Z")
_THOUGHT = "thought"


class ReasoningOutput:
    """Takes the text of one channel after the other, gives the reasoning to show.

    header: True if the first channel still begins with its name and a line break.
    """

    def __init__(self, header: bool = True) -> None:
        self._header = header
        self._held = ""
        self._shown = False
        self._separate = False

    def open(self) -> None:
        """A channel begins."""
        self._header, self._held, self._shown = True, "", False

    def feed(self, text: str) -> str:
        """Add text of the channel; returns what can be shown now."""
        self._held += text
        if self._header and not self._drop_header():
            return ""
        return self._release()

    def close(self) -> str:
        """The channel ends: what is left to show."""
        if self._header and self._held.strip() == _THOUGHT:
            self._held = ""
        self._header = False
        text = self._release()
        self._held = ""
        self._separate = self._separate or self._shown
        return text

    def _drop_header(self) -> bool:
        """Remove the channel's name; False while it may still be coming."""
        name, line_break, rest = self._held.partition("\n")
        if line_break:
            if _NAME.match(name):
                self._held = rest
        elif _NAME.match(name) or not name:
            return False
        self._header = False
        return True

    def _release(self) -> str:
        text = self._held if self._shown else self._held.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if not shown:
            return ""
        start = "\n\n" if self._separate and not self._shown else ""
        self._shown, self._separate = True, False
        return start + shown
