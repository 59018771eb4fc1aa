"""Gemma 4's own call syntax, `call:name{key:value,...}`: a strict reader, and one that repairs what models get wrong.

A call's text has QUOTE where the model wrote the string-quote token; text between two of them is literal.
Repairs are made only for declared tools, as only their schemas say where a value has to end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_gemma_coreml.chat.argument_types import Bare, coerce, properties_of, property_schema
from llm_gemma_coreml.chat.messages import Tool, ToolCall

QUOTE = "\udcff"
"""Stands for the quote token. A lone surrogate: decoded text never has one."""
MAX_DEPTH = 64
_NAME = re.compile(r"[\w.:-]+")
_HEAD = re.compile(r"\s*call\s*:\s*([\w.:-]+)\s*(?=\{)")
_LOOSE_HEAD = re.compile(r"\s*(?:call\b)?\s*:?\s*")
_SPACE = re.compile(r"\s*")
_BARE = re.compile(rf"[^,{{}}\[\]()\s\"{QUOTE}](?:[^,{{}}\[\]{QUOTE}\"]*[^,{{}}\[\]\s{QUOTE}\"])?")
_KEY = re.compile(rf"[^:={{}}\[\](),\s\"'{QUOTE}][^:={{}}\[\](),\"{QUOTE}]*")
_SINGLE_QUOTED_KEY = re.compile(rf"'([^'{QUOTE}]+)'(?=\s*[:=])")
_TWICE_QUOTED = re.compile(rf"'\s*{QUOTE}([^{QUOTE}]*){QUOTE}\s*'?(?=\s*(?:[,}}\])]|$))")


class CallSyntaxError(ValueError):
    """The text is no call; the message says where."""


@dataclass(frozen=True)
class Reading:
    """What was read. call is None if nothing could be; problem says why, or what is odd about the call."""

    call: ToolCall | None
    problem: str = ""


def show(text: str) -> str:
    """A call's text for people, quote tokens spelled as Gemma spells them."""
    return text.replace(QUOTE, '<|"|>')


def read_call(text: str, tools: Mapping[str, Tool], repair: bool = True) -> Reading:
    """Read one call, strictly first, then with repairs if its tool is declared and `repair` allows it."""
    try:
        call, end = _strict(text, 0, tools)
        if text[end:].strip():
            raise CallSyntaxError("text follows the call")
    except (CallSyntaxError, RecursionError) as error:
        problem = str(error)
    else:
        return Reading(
            call,
            "" if call.name in tools else f"The model called {call.name!r}, which is not a declared tool.",
        )
    if not repair:
        return Reading(None, "it was cut off")
    try:
        return Reading(_repaired(text, tools))
    except (CallSyntaxError, RecursionError):
        return Reading(None, problem)


def read_written_calls(text: str, tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """Calls in plain text without the call markers: all of the text must be calls of declared tools, else None."""
    calls: list[ToolCall] = []
    position = 0
    while text[position:].strip():
        try:
            call, end = _strict(text, position, tools)
        except (CallSyntaxError, RecursionError):
            break
        if call.name not in tools:
            return None
        calls.append(call)
        position = end
    rest = text[position:]
    if rest.strip():
        try:
            calls.append(_repaired(rest, tools))
        except (CallSyntaxError, RecursionError):
            return None
    return calls or None


def _strict(text: str, position: int, tools: Mapping[str, Tool]) -> tuple[ToolCall, int]:
    head = _HEAD.match(text, position)
    if head is None:
        raise CallSyntaxError("it does not begin with call:name{")
    name = head.group(1)
    schema = tools[name].parameters if name in tools else None
    reader = _Reader(text, head.end(), lenient=False)
    arguments = coerce(reader.value(schema, 0), schema, strict=True)
    return ToolCall(name, arguments), reader.position


def _repaired(text: str, tools: Mapping[str, Tool]) -> ToolCall:
    head = _LOOSE_HEAD.match(text)
    start = head.end() if head else 0
    name = next((n for n in sorted(tools, key=len, reverse=True) if _begins_with(text, start, n)), None)
    if name is None:
        raise CallSyntaxError("it names no declared tool")
    schema = tools[name].parameters
    reader = _Reader(text, start + len(name), lenient=True)
    arguments = reader.arguments(schema)
    return ToolCall(name, coerce(arguments, schema, strict=False))


def _begins_with(text: str, start: int, name: str) -> bool:
    end = start + len(name)
    return text.startswith(name, start) and not _NAME.match(text[end : end + 1])


class _Reader:
    """Reads values at `position`. Every step advances or raises, so that no input can hold it up."""

    def __init__(self, text: str, position: int, lenient: bool) -> None:
        self.text = text
        self.position = position
        self._lenient = lenient

    def arguments(self, schema: Any) -> dict[str, Any]:
        """Arguments after a name: `{...}`, `(...)`, or neither."""
        following = self._peek()
        if following in ("{", "("):
            self.position += 1
        elif not following and properties_of(schema) and schema.get("required"):
            raise CallSyntaxError("its arguments are missing")
        arguments = self._members(schema, 0, closing="})")
        if self.text[self.position :].strip(" \t\n\r})];,"):
            raise CallSyntaxError("text follows the call")
        return arguments

    def value(self, schema: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CallSyntaxError("it is nested too deeply")
        character = self._peek()
        if character == "{":
            self.position += 1
            return self._members(schema, depth + 1, closing="}")
        if character == "[":
            self.position += 1
            return self._items(schema, depth + 1)
        if character == QUOTE:
            return self._quoted(schema)
        if character == '"':
            return self._json_string()
        if character == "'" and self._lenient:
            twice = self._twice_quoted()
            return self._single_quoted() if twice is None else twice
        return self._bare()

    def _members(self, schema: Any, depth: int, closing: str) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._keys = properties_of(schema)
        while True:
            character = self._peek()
            if character and character in closing:
                self.position += 1
                return members
            if not character and self._lenient:
                return members
            if members and character == ",":
                self.position += 1
                if self._lenient and self._peek() in (*closing, ""):
                    continue
            elif members and not self._lenient:
                raise CallSyntaxError(f"a comma is missing at character {self.position}")
            key = self._key()
            child = property_schema(schema, key)
            members[key] = self.value(child, depth)
            self._keys = properties_of(schema)

    def _items(self, schema: Any, depth: int) -> list[Any]:
        items: list[Any] = []
        child = schema.get("items") if isinstance(schema, Mapping) else None
        while True:
            character = self._peek()
            if character == "]" or (self._lenient and character in ("}", ")", "")):
                self.position += character == "]"
                return items
            if items and character == ",":
                self.position += 1
            elif items:
                raise CallSyntaxError(f"a comma is missing at character {self.position}")
            items.append(self.value(child, depth))

    def _key(self) -> str:
        character = self._peek()
        if character == QUOTE:
            key = self._until_quote()
        elif character == '"':
            key = self._json_string()
        elif self._lenient and (quoted := _SINGLE_QUOTED_KEY.match(self.text, self.position)):
            key = quoted.group(1)
            self.position = quoted.end()
        else:
            match = _KEY.match(self.text, self.position)
            if match is None:
                raise CallSyntaxError(f"a key is missing at character {self.position}")
            self.position = match.end()
            key = match.group().strip()
        if self._peek() != ":" and not (self._lenient and self._peek() == "="):
            raise CallSyntaxError(f"a colon is missing at character {self.position}")
        self.position += 1
        return key

    def _quoted(self, schema: Any) -> str:
        start = self.position
        end = self.text.find(QUOTE, start + 1)
        if not self._lenient:
            return self._until_quote()
        following = _SPACE.sub("", self.text[end + 1 : end + 64])[:1] if end >= 0 else "?"
        if end >= 0 and (not following or following in ",}])"):
            self.position = end + 1
            return self.text[start + 1 : end]
        # The closing quote is missing: the string ends before the next declared key, or with the call.
        self.position = start + 1
        return self._to_next_key()

    def _until_quote(self) -> str:
        end = self.text.find(QUOTE, self.position + 1)
        if end < 0:
            raise CallSyntaxError("a string has no end")
        text = self.text[self.position + 1 : end]
        self.position = end + 1
        return text

    def _json_string(self) -> str:
        try:
            value, self.position = json.JSONDecoder(strict=False).raw_decode(self.text, self.position)
        except ValueError as error:
            raise CallSyntaxError("a string cannot be read") from error
        return str(value).replace(QUOTE, '"')

    def _twice_quoted(self) -> str | None:
        """A string whose quote tokens stand in single quotes of their own, the last of which may be missing."""
        match = _TWICE_QUOTED.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group(1)

    def _single_quoted(self) -> str:
        match = re.compile(r"'((?:[^'\\]|\\.)*)'(?=\s*(?:[,}\])]|$))", re.DOTALL).match(self.text, self.position)
        if match is None:
            return self._to_next_key()
        self.position = match.end()
        return match.group(1)

    def _bare(self) -> Any:
        if self._lenient:
            end = self.text.find(QUOTE, self.position)
            stop = self._next_key(self.position)
            following = _SPACE.sub("", self.text[end + 1 : end + 64])[:1] if end >= 0 else "?"
            if 0 <= end < stop and (not following or following in ",}])"):
                text = self.text[self.position : end]  # the opening quote is missing
                self.position = end + 1
                return text
        match = _BARE.match(self.text, self.position)
        if match is None:
            raise CallSyntaxError(f"a value is missing at character {self.position}")
        word = match.group()
        if self._lenient and "(" not in word:
            word = word.rstrip(")").rstrip() or word  # the end of `name(key=value)`
        elif word.startswith("'"):
            raise CallSyntaxError(f"a string is quoted with ' at character {self.position}")
        self.position += len(word)
        return Bare(word)

    def _to_next_key(self) -> str:
        end = self._next_key(self.position)
        text = self.text[self.position : end]
        if end == len(self.text):
            shorter = text.rstrip(" \t\n\r})]")
            text = shorter if shorter else text
        self.position += len(text)
        return text.strip().strip(QUOTE).replace(QUOTE, '"')

    def _next_key(self, position: int) -> int:
        """Where `,key:` of a declared key of the current object comes next; the end of the text if nowhere."""
        if not self._keys:
            return len(self.text)
        names = "|".join(re.escape(key) for key in self._keys)
        match = re.compile(rf"\s*,\s*[\"'{QUOTE}]?(?:{names})[\"'{QUOTE}]?\s*[:=]").search(self.text, position)
        return match.start() if match else len(self.text)

    def _peek(self) -> str:
        match = _SPACE.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.text[self.position : self.position + 1]
