"""Questions about a long document: split by exact token counts, embedded in this process, found in Qdrant, answered, cited.

Run: python -m examples.rag "Who bought Joseph in Egypt?"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.vectorstores import VectorStore
from langchain_qdrant import QdrantVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from examples.long_text import chapters
from langchain_adapter import ChatGemmaCoreML
from langchain_adapter.citations import with_citations
from langchain_adapter.embeddings import MiniLMEmbeddings
from langchain_adapter.encoding import gemma_encoding

CHUNK_TOKENS = 120
INSTRUCTION = "Answer the question from the passage with a few words."


@dataclass(frozen=True)
class Answer:
    """An answer with its citations, and the passages that it was given."""

    message: AIMessage
    passages: list[Document]


def build_store(documents: Sequence[Document], model: str = "gemma3-local", path: str | None = None) -> VectorStore:
    """A Qdrant collection inside this process, in memory or in a folder. Chunks have at most CHUNK_TOKENS Gemma tokens."""
    splitter = RecursiveCharacterTextSplitter.from_tiktoken_encoder(
        encoding_name=gemma_encoding(model).name, chunk_size=CHUNK_TOKENS, chunk_overlap=0
    )
    chunks = splitter.split_documents(documents)
    place = {"path": path} if path else {"location": ":memory:"}
    return QdrantVectorStore.from_documents(chunks, MiniLMEmbeddings(), collection_name="chunks", **place)


def ask(model: ChatGemmaCoreML, store: VectorStore, question: str, passages: int = 3) -> Answer:
    """The answer to one question. The passages come first and the question last, so that prefixes can be reused."""
    found = store.similarity_search(question, k=passages)
    text = "\n\n".join(document.page_content for document in found)
    messages = [SystemMessage(INSTRUCTION), HumanMessage(f"Passage: {text}\n\nQuestion: {question}")]
    return Answer(with_citations(model.invoke(messages), found), found)


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Who bought Joseph in Egypt?"
    model = ChatGemmaCoreML(model="gemma3-local", max_tokens=24, stop=["\n"])
    store = build_store(chapters())
    answer = ask(model, store, question)
    for passage in answer.passages:
        print(f"[{passage.metadata['title']}] {passage.page_content[:100]!r}...")
    print(f"\nQ: {question}\nA: {answer.message.text}")
    for block in answer.message.content_blocks:
        for note in block.get("annotations", []):
            print(f"   cited from {note['title']}: {note['cited_text']!r}")


if __name__ == "__main__":
    main()
