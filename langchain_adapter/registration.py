"""Makes `init_chat_model(..., model_provider="gemma_coreml")` find the chat model."""

from __future__ import annotations

from typing import Any

from langchain_adapter.exceptions import MissingExtraError
from langchain_adapter.replies import PROVIDER


def register() -> None:
    """Add the provider to LangChain's table, which has no entry points. Raises MissingExtraError without langchain."""
    try:
        from langchain.chat_models import base
    except ImportError as error:
        message = "init_chat_model is part of the package langchain. Install it with: pip install langchain"
        raise MissingExtraError(message) from error
    base._BUILTIN_PROVIDERS[PROVIDER] = ("langchain_adapter", "ChatGemmaCoreML", _create)


def _create(cls: type[Any], **kwargs: Any) -> Any:
    return cls(**kwargs)
