"""Our errors as LangChain's: each is both, so that code that catches either goes on working."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as langchain_exceptions

from llm_gemma_coreml import errors


class InvalidRequestError(langchain_exceptions.ModelInvalidRequestError, errors.RequestError):
    """The request asks for something impossible; the message says what, and what to do."""


class ModelMissingError(langchain_exceptions.ModelNotFoundError, errors.ModelNotInstalledError):
    """There is no such bundle; the message holds the command that installs it, or the names that there are."""


class BundleUnusableError(langchain_exceptions.ModelError, errors.BundleError):
    """The bundle is there but cannot be used."""


class MissingExtraError(langchain_exceptions.ModelError, errors.MissingDependencyError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""


class ContextOverflowError(langchain_exceptions.ContextOverflowError, errors.ContextOverflowError):
    """The prompt does not fit. Has prompt_tokens, requested_tokens and context_tokens; nothing was computed."""


class GenerationError(langchain_exceptions.ModelError, errors.GemmaCoreMLError):
    """Anything else that went wrong in the engine."""


class AnswerTimeoutError(langchain_exceptions.ModelTimeoutError, errors.GemmaCoreMLError):
    """The answer was not finished within `timeout` seconds."""


def translated(error: errors.GemmaCoreMLError) -> langchain_exceptions.LangChainException:
    """The LangChain form of one of our errors."""
    if isinstance(error, langchain_exceptions.LangChainException):
        return error
    if isinstance(error, errors.ContextOverflowError):
        return ContextOverflowError(error.prompt_tokens, error.requested_tokens, error.context_tokens)
    kinds: tuple[tuple[type[errors.GemmaCoreMLError], type[langchain_exceptions.LangChainException]], ...] = (
        (errors.RequestError, InvalidRequestError),
        (errors.ModelNotInstalledError, ModelMissingError),
        (errors.MissingDependencyError, MissingExtraError),
        (errors.BundleError, BundleUnusableError),
    )
    kind = next((found for ours, found in kinds if isinstance(error, ours)), GenerationError)
    return kind(str(error))


@contextmanager
def as_langchain_errors() -> Iterator[None]:
    """Within it, our errors are raised as LangChain's."""
    try:
        yield
    except errors.GemmaCoreMLError as error:
        if isinstance(error, langchain_exceptions.LangChainException):
            raise
        raise translated(error) from error
