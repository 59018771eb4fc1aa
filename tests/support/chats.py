"""Chats over the real vocabulary without a model, and ids written as readable text."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from support.gemma4_tokenizer import gemma3_model, gemma4_model

from llm_gemma_coreml.bundle.manifest import Manifest
from llm_gemma_coreml.chat.chat import Chat
from llm_gemma_coreml.chat.tokenizer import Tokenizer

MARKER = re.compile(r"<\|?[a-z_]+\|?>|<\|\"\|>|<\|[a-z_]+\|>")

GEMMA3_TEMPLATE = """\
{{- bos_token -}}
{%- set prefix = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set prefix = messages[0].content + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
    {{- prefix if loop.first -}}{{- message.content | trim -}}{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def own_template(name: str) -> str:
    """A template that comes with the package."""
    folder = resources.files("llm_gemma_coreml.chat") / "templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def chat(kind: str, template: str | None = None) -> Chat:
    """A chat of that kind; without a template, with our own one (for gemma3: one that does what Google's does)."""
    folder = Path(tempfile.mkdtemp())
    model = gemma4_model() if kind == "gemma4" else gemma3_model()
    source = template or (GEMMA3_TEMPLATE if kind == "gemma3" else own_template(kind))
    (folder / "template.jinja").write_text(source, encoding="utf-8")
    manifest = SimpleNamespace(
        template_kind=kind,
        tokenizer=str(model),
        chat_template="template.jinja",
        stop_ids=(1,),
        vocabulary_size=262144,
        head_output="logits",
    )
    return Chat(folder, cast(Manifest, manifest))


@cache
def gemma3_tokenizer() -> Tokenizer:
    return Tokenizer(gemma3_model())


@cache
def gemma4_tokenizer() -> Tokenizer:
    return Tokenizer(gemma4_model())


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text in which control tokens are spelled by name."""
    found: list[int] = []
    start = 0
    for match in MARKER.finditer(text):
        token = tokenizer.find_control(match.group())
        if token is not None:
            found += [*tokenizer.encode_text(text[start : match.start()]), token]
            start = match.end()
    return found + tokenizer.encode_text(text[start:])


def spell(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The inverse of `ids`: only real control tokens are spelled by name, so that a literal one looks the same."""
    from llm_gemma_coreml.chat.detokenizer import Detokenizer

    detokenizer = Detokenizer(tokenizer)
    parts: list[str] = []
    for token in tokens:
        if tokenizer.is_control(token):
            parts += [detokenizer.flush(), tokenizer.piece(token)]
        else:
            parts.append(detokenizer.feed(token))
    return "".join(parts) + detokenizer.flush()


def control_ids(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The names of the control tokens among `tokens`."""
    return [tokenizer.piece(token) for token in tokens if tokenizer.is_control(token)]


def values(events: Sequence[Any]) -> list[Any]:
    """Events as short tuples, ids of calls left out."""
    from llm_gemma_coreml.chat.messages import ReasoningEvent, TextEvent, ToolCallEvent

    short: list[Any] = []
    for event in events:
        if isinstance(event, (TextEvent, ReasoningEvent)):
            kind = "text" if isinstance(event, TextEvent) else "reasoning"
            if short and short[-1][0] == kind:
                short[-1] = (kind, short[-1][1] + event.text)
            else:
                short.append((kind, event.text))
        elif isinstance(event, ToolCallEvent):
            short.append(("call", event.index, event.name, event.arguments_json))
        else:
            short.append(("warning",))
    return short
