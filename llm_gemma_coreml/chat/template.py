"""Renders a chat template and tokenises the result so that only the template itself can write control tokens.

Every text that a user, a tool or a model wrote is represented in the render context by a placeholder. The rendered
text is cut at placeholders and at the template's own control tokens; the control tokens become ids, and the ordinary
text between two of them, the template's and the users' joined, is encoded as plain text. So ids at the borders are
those that the whole text would give, and a user's text that spells a control token stays text.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, RequestError

MAX_TEMPLATE_BYTES = 256 * 1024
ENCODED_TEXTS = 64
"""Texts between control tokens, most often messages, whose ids are kept: a conversation grows by a message at a time."""
_OPEN, _CLOSE = "\ue000", "\ue001"
_PLACEHOLDER = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_STRUCTURAL = re.compile(r"[A-Za-z0-9_.:/-]{0,128}\Z")


class Placeholders:
    """The texts behind the placeholders of one rendering."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def text(self, text: str) -> str:
        """A stand-in for free text. Outer white space stays outside, so that a template's `trim` and its tests for
        emptiness work as on the text itself."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        self._texts.append(core)
        return f"{text[:start]}{_OPEN}{len(self._texts) - 1}{_CLOSE}{text[start + len(core) :]}"

    def value(self, value: Any) -> Any:
        """The JSON-like value with stand-ins for its strings. Plain identifiers stay, as templates sort by them."""
        if isinstance(value, str):
            return value if _STRUCTURAL.match(value) else self.text(value)
        if isinstance(value, Mapping):
            return {self.value(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.value(item) for item in value]
        return value

    def restore(self, rendered: str) -> str:
        """`rendered` with the texts in place of the placeholders."""
        return _PLACEHOLDER.sub(lambda match: self._find(match), rendered)

    def restore_value(self, value: Any) -> Any:
        """The inverse of `value`."""
        if isinstance(value, str):
            return self.restore(value)
        if isinstance(value, Mapping):
            return {self.restore(str(key)): self.restore_value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.restore_value(item) for item in value]
        return value

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Pieces of the rendered text in order; True marks a user's text, False the template's own."""
        pieces: list[tuple[str, bool]] = []
        start = size = 0
        limit = 4 * sum(map(len, self._texts)) + 1_000_000
        for match in _PLACEHOLDER.finditer(rendered):
            pieces += [(rendered[start : match.start()], False), (self._find(match), True)]
            start = match.end()
            size += len(pieces[-1][0])
            if size > limit:
                raise BundleError("The chat template repeats the messages too often.")
        return [*pieces, (rendered[start:], False)]

    def _find(self, match: re.Match[str]) -> str:
        index = int(match.group(1)[:9])
        if index >= len(self._texts):
            raise BundleError("The chat template writes a placeholder that stands for nothing.")
        return self._texts[index]


class ChatTemplate:
    """A compiled Jinja template. Raises BundleError if it cannot be read or compiled. Usable from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, name: str = "chat template") -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._placeholders = Placeholders()
        self._control = _control_pattern(tokenizer)
        self._encode = lru_cache(maxsize=ENCODED_TEXTS)(lambda text: tuple(tokenizer.encode_text(text)))
        if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES or _OPEN in source:
            raise BundleError(f"{name} is larger than {MAX_TEMPLATE_BYTES} bytes or uses reserved characters.")
        self._compile(source)

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """The template in the file at `path`."""
        try:
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise BundleError(f"The chat template {path} is larger than {MAX_TEMPLATE_BYTES} bytes.")
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"Cannot read the chat template {path}: {error}. Install the bundle again.") from error
        return cls(source, tokenizer, str(path))

    def token_ids(self, placeholders: Placeholders, context: Mapping[str, Any]) -> list[int]:
        """Render and tokenise: `<bos>` once, at the beginning. `context` holds only values from `placeholders`."""
        rendered = self._render(placeholders, context)
        return self._tokenise(placeholders.split(rendered))

    def text(self, placeholders: Placeholders, context: Mapping[str, Any]) -> str:
        """The rendered text, for people; tokenising it would not be safe."""
        return placeholders.restore(self._render(placeholders, context))

    def _compile(self, source: str) -> None:
        from llm_gemma_coreml.chat.sandbox import ChatSandbox

        self._sandbox = ChatSandbox()
        self._sandbox.filters["tojson"] = self._tojson
        self._sandbox.globals["raise_exception"] = _raise_exception
        try:
            self._template = self._sandbox.compile_bounded(source)
        except Exception as error:  # whatever a stranger's template makes the compiler raise
            raise BundleError(f"{self.name} cannot be compiled: {_reason(error)}.") from error

    def _render(self, placeholders: Placeholders, context: Mapping[str, Any]) -> str:
        with self._lock:
            self._placeholders = placeholders
            self._sandbox.start()
            try:
                return str(self._template.render(**context))
            except GemmaCoreMLError:
                raise
            except Exception as error:  # whatever a stranger's template raises
                raise BundleError(f"{self.name} cannot be rendered: {_reason(error)}.") from error

    def _tojson(self, value: Any, indent: int | None = None, **_: Any) -> str:
        real = self._placeholders.restore_value(value)
        width = None if indent is None else max(0, min(int(indent), 8))
        return self._placeholders.text(json.dumps(real, ensure_ascii=False, indent=width))

    def _tokenise(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        bos = self._tokenizer.control_id("<bos>")
        ids: list[int] = [bos]
        plain: list[str] = []

        def flush() -> None:
            ids.extend(self._encode("".join(plain)))
            plain.clear()

        for text, untrusted in pieces:
            if untrusted:
                plain.append(text)
                continue
            start = 0
            for match in self._control.finditer(text):
                token = self._tokenizer.find_control(match.group())
                if token is None:
                    continue
                plain.append(text[start : match.start()])
                flush()
                if token != bos:
                    ids.append(token)
                start = match.end()
            plain.append(text[start:])
        flush()
        return ids


def _control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    names = sorted(tokenizer.control_names(), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, names), r"<unused\d{1,4}>"]))


def _raise_exception(message: object) -> None:
    raise RequestError(f"The chat template refuses these messages: {_PLACEHOLDER.sub('...', str(message))}")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it recurses too deeply"
    return f"{type(error).__name__}: {str(error)[:200]}".rstrip(".: ")
