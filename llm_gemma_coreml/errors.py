"""The errors that users see. Each message names what was wrong and what to do about it."""

from __future__ import annotations


class GemmaCoreMLError(Exception):
    """Base of every error that is reported to users as one clear line (exit code 1, no traceback)."""


class BundleError(GemmaCoreMLError):
    """A bundle on disk is missing, incomplete, changed or not ours to read."""


class PackageError(BundleError):
    """An `.mlpackage` (manifest, specification or weight file) cannot be read."""


class UnsupportedOperationError(PackageError):
    """A package uses a MIL operation, or a form of one, that the portable runtime cannot translate."""


class SourceError(GemmaCoreMLError):
    """A checkpoint given to `convert` (GGUF, safetensors) cannot be read or is of an unsupported family."""


class ModelNotInstalledError(GemmaCoreMLError):
    """The model is known but no bundle of it is installed; the message holds the exact command to get one."""


class MissingDependencyError(GemmaCoreMLError):
    """An optional dependency is missing or too old; the message names the extra that brings it."""


class ContextOverflowError(GemmaCoreMLError):
    """A prompt (with the tokens to generate) does not fit the context. Raised before anything is computed.

    prompt_tokens, requested_tokens and context_tokens are counts of tokens.
    """

    def __init__(self, prompt_tokens: int, requested_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.requested_tokens = requested_tokens
        self.context_tokens = context_tokens
        asked = f" and {requested_tokens} to generate" if requested_tokens else ""
        super().__init__(
            f"The prompt has {prompt_tokens} tokens{asked}, but the context holds {context_tokens}. "
            "Shorten the prompt, lower max_tokens, or use a bundle with a larger context."
        )


class RequestError(GemmaCoreMLError):
    """A request asks for something impossible: a bad option, schema, message order or tool."""
