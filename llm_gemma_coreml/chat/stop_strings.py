"""Stop strings over streamed text: text that may be the beginning of a stop string is held back."""

from __future__ import annotations

from collections.abc import Sequence

from llm_gemma_coreml.errors import RequestError


class StopStrings:
    """Passes text on until the first of the stop strings; that string and all after it are dropped.

    At most max(len(stop)) - 1 characters are held back, and only while they may still become a stop string.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if any(not isinstance(text, str) or not text for text in stop):
            raise RequestError("A stop string is empty. Give stop strings of at least one character.")
        self._stop = tuple(dict.fromkeys(stop))
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.stopped = False
        """True once a stop string has been seen."""

    def feed(self, text: str) -> str:
        """The text that is now certain to lie before any stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text: no more text follows, so that it is no stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
