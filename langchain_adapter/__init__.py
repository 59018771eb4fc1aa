"""LangChain on Gemma Core ML bundles: the chat model and its helpers, loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_adapter.chat_model import ChatGemmaCoreML
    from langchain_adapter.citations import with_citations
    from langchain_adapter.embeddings import MiniLMEmbeddings
    from langchain_adapter.encoding import gemma_encoding
    from langchain_adapter.registration import register
    from langchain_adapter.tokenizer import GemmaCoreMLTokenizer

_HOMES = {
    "ChatGemmaCoreML": "chat_model",
    "GemmaCoreMLTokenizer": "tokenizer",
    "MiniLMEmbeddings": "embeddings",
    "gemma_encoding": "encoding",
    "register": "registration",
    "with_citations": "citations",
}
__all__ = ["ChatGemmaCoreML", "GemmaCoreMLTokenizer", "MiniLMEmbeddings", "gemma_encoding", "register", "with_citations"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in ("langchain_core", "langchain"):
            raise ImportError(
                f"{name} needs the package {error.name}. Install it with: pip install 'llm-gemma-coreml[langchain]'"
            ) from error
        raise
    return getattr(module, name)
