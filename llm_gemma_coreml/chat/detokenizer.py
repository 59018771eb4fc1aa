"""Token ids to text, one at a time: a character split over several tokens is held back until it is whole."""

from __future__ import annotations

import codecs

from llm_gemma_coreml.chat.tokenizer import Tokenizer

_ERRORS = "llm_gemma_coreml_one_replacement_per_byte"


def _one_replacement_per_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_ERRORS, _one_replacement_per_byte)


class Detokenizer:
    """Text of a stream of ids. Control tokens add nothing. Each invalid byte becomes one U+FFFD. O(1) per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=_ERRORS)

    def feed(self, token: int) -> str:
        """The text that `token` completes; "" while a character is unfinished."""
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        """What is left at the end: one U+FFFD for each byte of an unfinished character. Ready to start again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def decode(tokenizer: Tokenizer, tokens: list[int] | tuple[int, ...]) -> str:
    """The text of `tokens`, control tokens left out."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.flush()
