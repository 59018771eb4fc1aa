"""Ids of a reply to events: a state machine on ids, so that text which merely spells a marker stays text."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from enum import Enum

from llm_gemma_coreml.chat import call_syntax, json_tools
from llm_gemma_coreml.chat.call_syntax import QUOTE
from llm_gemma_coreml.chat.detokenizer import Detokenizer
from llm_gemma_coreml.chat.messages import (
    ReasoningEvent,
    ReplyEvent,
    TextEvent,
    ToolCall,
    ToolCallEvent,
    WarningEvent,
)
from llm_gemma_coreml.chat.prompt import Prompt
from llm_gemma_coreml.chat.reasoning import ReasoningOutput
from llm_gemma_coreml.chat.structured import hint_if_missing
from llm_gemma_coreml.chat.text_output import TextOutput
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.chat.transcript import ANSWER, CALL


class _State(Enum):
    CONTENT = 1
    REASONING = 2
    CALL = 3


class ReplyParser:
    """One reply. `feed` takes ids as they come, any number at a time; `finish` ends the reply.

    Stop strings act on the visible text only; after one, `stopped` is True and all further ids are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stop: Sequence[str] = (), transcript: bool = False) -> None:
        self._markers = {
            token: handler
            for name, handler in {
                "<|channel>": self._open_channel,
                "<channel|>": self._close_channel,
                "<|tool_call>": self._open_call,
                "<tool_call|>": self._close_call,
                '<|"|>': self._quote,
            }.items()
            if (token := tokenizer.find_control(name)) is not None
        }
        self._is_control = tokenizer.is_control
        self._stop_ids = prompt.stop_ids
        self._text = Detokenizer(tokenizer)
        self._tools = {tool.name: tool for tool in prompt.tools}
        label = ANSWER if transcript and prompt.tools else ""
        self._output = TextOutput((*prompt.stop_strings, *stop), transcript, _call_beginnings(prompt), label, (f"\n{CALL}",))
        self._reasoning = ReasoningOutput(header=not prompt.starts_in_reasoning)
        self._state = _State.REASONING if prompt.starts_in_reasoning else _State.CONTENT
        self._call: list[str] = []
        self._calls = 0
        self._said_something = False
        self.reasoning_tokens = 0
        """Tokens that were thoughts, markers not counted."""
        self._events: list[ReplyEvent] = []
        self._ended = False

    @property
    def stopped(self) -> bool:
        """True once a stop string or a stop id has ended the reply."""
        return self._ended or self._output.stopped

    def feed(self, tokens: Sequence[int]) -> list[ReplyEvent]:
        """The events that `tokens` complete, in order. Calls are reported when complete only."""
        for token in tokens:
            if self.stopped:
                break
            self._take(token)
        return self._taken()

    def finish(self, complete: bool = True) -> list[ReplyEvent]:
        """The rest of the events. complete: False if the reply was cut off (max_tokens, cancelled), so that an
        unfinished call must not be repaired and run."""
        self._flush()
        if self._state is _State.CALL:
            self._end_call(complete)
        elif self._state is _State.REASONING:
            self._say_reasoning(self._reasoning.close())
        text, kept = self._output.finish()
        self._say(text)
        if kept:
            self._written_calls(kept, complete)
        self._state, self._ended = _State.CONTENT, True
        return self._taken()

    def _take(self, token: int) -> None:
        if token in self._stop_ids:
            self._ended = True
            return
        handler = self._markers.get(token)
        if handler is not None:
            self._flush()
            handler()
        elif not self._is_control(token):
            self.reasoning_tokens += self._state is _State.REASONING
            self._add(self._text.feed(token))

    def _flush(self) -> None:
        self._add(self._text.flush())

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.CALL:
            self._call.append(text)
        elif self._state is _State.REASONING:
            self._say_reasoning(self._reasoning.feed(text.replace(QUOTE, '"')))
        else:
            self._say(self._output.feed(text))

    def _open_channel(self) -> None:
        if self._state is _State.CALL:
            return
        if self._state is _State.REASONING:
            self._say_reasoning(self._reasoning.close())
        else:
            self._say(self._output.interrupt())
        self._reasoning.open()
        self._state = _State.REASONING

    def _close_channel(self) -> None:
        if self._state is _State.REASONING:
            self._say_reasoning(self._reasoning.close())
            self._state = _State.CONTENT
            self._output.strip_start()

    def _open_call(self) -> None:
        if self._state is _State.CALL:
            self._end_call(complete=True)
        elif self._state is _State.REASONING:
            self._say_reasoning(self._reasoning.close())
        self._say(self._output.interrupt())
        self._output.after_call()
        self._state = _State.CALL

    def _close_call(self) -> None:
        if self._state is _State.CALL:
            self._end_call(complete=True)
            self._state = _State.CONTENT

    def _quote(self) -> None:
        self._add(QUOTE)

    def _end_call(self, complete: bool) -> None:
        text = "".join(self._call)
        self._call.clear()
        if not text.strip():
            return
        reading = call_syntax.read_call(text, self._tools, repair=complete)
        if reading.call is None:
            shown = call_syntax.show(text)
            self._say(f"\n{shown}" if self._said_something else shown)
            self._warn_of_call(shown, reading.problem or "unknown reason")
            return
        if reading.problem:
            self._events.append(WarningEvent(reading.problem))
        self._emit_call(reading.call)

    def _written_calls(self, text: str, complete: bool) -> None:
        """A reply that looks like a call in plain text: a call only if it is nothing else and its tool is declared."""
        calls = json_tools.read_calls(text, self._tools) or (
            call_syntax.read_written_calls(text, self._tools) if complete else None
        )
        if not calls:
            self._say(text)
            if json_tools.is_broken_call(text, self._tools):
                self._warn_of_call(text.strip(), "it is not complete JSON" if complete else "the reply was cut off in it")
            return
        for call in calls:
            self._emit_call(call)

    def _warn_of_call(self, text: str, problem: str) -> None:
        name = next((name for name in sorted(self._tools, key=len, reverse=True) if name in text), "")
        message = f"A tool call could not be read ({problem}) and is shown as text.{hint_if_missing()}"
        self._events.append(WarningEvent(message, text, name, _new_id()))

    def _emit_call(self, call: ToolCall) -> None:
        arguments = json_tools.strict_json(dict(call.arguments))
        self._events.append(ToolCallEvent(self._calls, _new_id(), call.name, arguments))
        self._calls += 1

    def _say(self, text: str) -> None:
        if text:
            self._said_something = True
            self._events.append(TextEvent(text.replace(QUOTE, '"')))

    def _say_reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningEvent(text))

    def _taken(self) -> list[ReplyEvent]:
        events, self._events = self._events, []
        return _merged(events)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:20]}"


def _call_beginnings(prompt: Prompt) -> tuple[str, ...]:
    """How a reply begins that may be a call written as text."""
    if not prompt.tools:
        return ()
    if prompt.schema is not None:
        return ("{", CALL)
    names = [f"{tool.name}{bracket}" for tool in prompt.tools for bracket in "{("]
    return ("{", "[", "```", "call:", CALL, *names)


def _merged(events: Sequence[ReplyEvent]) -> list[ReplyEvent]:
    """Neighbouring text (or reasoning) events as one."""
    merged: list[ReplyEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TextEvent) and isinstance(last, TextEvent):
            merged[-1] = TextEvent(last.text + event.text)
        elif isinstance(event, ReasoningEvent) and isinstance(last, ReasoningEvent):
            merged[-1] = ReasoningEvent(last.text + event.text)
        else:
            merged.append(event)
    return merged
