"""The visible text of a reply as it streams: stop strings, white space at the borders, calls written as text."""

from __future__ import annotations

from collections.abc import Sequence

from llm_gemma_coreml.chat.stop_strings import StopStrings


class TextOutput:
    """Takes decoded text, gives the text to show.

    With `trim`, white space at both ends is dropped; otherwise only what `interrupt` and `strip_start` drop.
    `label` is dropped where the reply begins with it; then `after_label` are stop strings too.
    With `call_beginnings`, a reply that begins with one of them is kept back whole: `kept` has it at the end.
    """

    def __init__(
        self,
        stop: Sequence[str],
        trim: bool,
        call_beginnings: Sequence[str] = (),
        label: str = "",
        after_label: Sequence[str] = (),
    ) -> None:
        self._stops = StopStrings(stop)
        self._trim = trim
        self._beginnings = tuple(call_beginnings)
        self._label = label
        self._answer_stops = StopStrings(after_label)
        self._in_answer = False
        self._started = not self._beginnings and not label
        self._at_start = trim
        self._waiting = ""
        """Text that is not yet shown: white space that may turn out to be the end, or what may begin a call."""
        self.keeping = False
        """True while the reply is kept back because it looks like a call."""

    @property
    def stopped(self) -> bool:
        """True once a stop string has been seen."""
        return self._stops.stopped or self._answer_stops.stopped

    def strip_start(self) -> None:
        """Drop white space up to the next visible character."""
        self._at_start = True

    def feed(self, text: str) -> str:
        """Add text; returns what can be shown now."""
        text = self._stops.feed(text)
        return self._show(self._answer_stops.feed(text) if self._in_answer else text)

    def interrupt(self) -> str:
        """What is left before a thought or a call: white space at the end is dropped."""
        text = self._show(self._flush_stops())
        text, self._waiting = text + self._waiting.rstrip(), ""
        if text:
            self._started = True
        self.keeping = False
        return text

    def after_call(self) -> None:
        """What follows is text, even if it looks like a call."""
        self._started = True

    def finish(self) -> tuple[str, str]:
        """What is left at the end: (text to show, kept text that looks like a call)."""
        text = self._show(self._flush_stops())
        rest, self._waiting = self._waiting, ""
        if self.keeping:
            return text, rest.rstrip() if self._trim else rest
        return text + (rest.rstrip() if self._trim else rest), ""

    def _flush_stops(self) -> str:
        text = self._stops.flush()
        return self._answer_stops.feed(text) + self._answer_stops.flush() if self._in_answer else text

    def _show(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            if not text:
                return ""
            self._at_start = False
        text = self._waiting + text
        if not self._started:
            return self._begin(text)
        shown = text.rstrip()
        self._waiting = text[len(shown) :]
        return shown

    def _begin(self, text: str) -> str:
        beginning = text.lstrip()
        self._waiting = text
        if self._label and beginning.startswith(self._label):
            self._in_answer = True
            rest = self._answer_stops.feed(beginning[len(self._label) :])
            self._label, self._waiting, self._at_start = "", "", True
            return self._show(rest)
        if self.keeping or any(beginning.startswith(start) for start in self._beginnings):
            self.keeping = True
            return ""
        if not beginning or any(start.startswith(beginning) for start in (*self._beginnings, self._label)):
            return ""
        self._started, self._waiting = True, ""
        return self._show(text)
