"""Messages to alternating turns, for models that know only a user and an assistant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llm_gemma_coreml.chat.messages import Message
from llm_gemma_coreml.errors import RequestError


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation, as the template shows it."""

    role: Literal["user", "assistant"]
    text: str


def require_messages(messages: Sequence[Message]) -> None:
    """Raise RequestError unless there is something to answer."""
    if not any(message.role != "system" for message in messages):
        raise RequestError("There is nothing to answer: the prompt is empty. Give a prompt text.")
    for message in messages:
        if message.role not in ("system", "user", "assistant", "tool"):
            raise RequestError(f"Unknown role {message.role!r}. Use system, user, assistant or tool.")


def leading_system_text(messages: Sequence[Message]) -> tuple[str, Sequence[Message]]:
    """The joined text of the system messages at the beginning, and the messages after them."""
    count = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    texts = [message.text for message in messages[:count] if message.text.strip()]
    return "\n\n".join(texts), messages[count:]


def alternating(
    messages: Sequence[Message], assistant_text: Callable[[Message], str], tool_text: Callable[[Message], str]
) -> list[Turn]:
    """Turns that begin with the user and alternate: tool results and later system texts become user text, and
    neighbours of one role are joined by an empty line."""
    turns: list[Turn] = []
    for message in messages:
        role: Literal["user", "assistant"] = "assistant" if message.role == "assistant" else "user"
        text = message.text
        if message.role == "assistant":
            text = assistant_text(message)
        elif message.role == "tool":
            text = tool_text(message)
        if turns and turns[-1].role == role:
            joined = "\n\n".join(part for part in (turns[-1].text, text) if part.strip())
            turns[-1] = Turn(role, joined)
        else:
            turns.append(Turn(role, text))
    if turns and turns[0].role != "user":
        turns.insert(0, Turn("user", ""))
    return turns
