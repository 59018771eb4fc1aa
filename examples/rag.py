"""Questions about a long document: split by exact token counts, embedded in this process, found in Qdrant, answered, cited.

Run: python -m examples.rag "Who bought Joseph in Egypt?"
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
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
EXAMPLES = (
    (
        "There was a man in the land of Uz, whose name was Job; and that man was perfect and upright.",
        "In which land did Job live?",
        "Uz",
    ),
    (
        "So she gleaned in the field until even, and beat out that she had gleaned: and it was about an ephah of barley.",
        "How much barley did she glean?",
        "about an ephah",
    ),
)
"""A base model has to be shown what an answer is. Neither passage is from the text that the questions are about."""


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


def conversation(question: str, passage: str | None = None) -> list[BaseMessage]:
    """The messages that ask a question. Those that never change come first, so that their K/V is reused."""
    messages: list[BaseMessage] = [SystemMessage(INSTRUCTION)]
    for shown, example, answer in EXAMPLES:
        messages += [_asked(example, shown if passage is not None else None), AIMessage(answer)]
    return [*messages, _asked(question, passage)]


def _asked(question: str, passage: str | None) -> HumanMessage:
    return HumanMessage(f"Question: {question}" if passage is None else f"Passage: {passage}\n\nQuestion: {question}")


def ask(model: ChatGemmaCoreML, store: VectorStore, question: str, passages: int = 3) -> Answer:
    """The answer to one question, with citations from the passages that were found for it."""
    found = store.similarity_search(question, k=passages)
    passage = "\n".join(document.page_content for document in found)
    return Answer(with_citations(model.invoke(conversation(question, passage)), found), found)


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Who bought Joseph in Egypt?"
    model = ChatGemmaCoreML(model="gemma3-local", max_tokens=24, stop=["\n"])
    store = build_store(chapters())
    answer = ask(model, store, question)
    for passage in answer.passages:
        print(f"[{passage.metadata['title']}] {passage.page_content[:100]!r}...")
    print(f"\nQ: {question}\nA: {answer.message.text}")
    for block in answer.message.content_blocks:
        if block["type"] == "text":
            for note in block.get("annotations", []):
                if note["type"] == "citation":
                    print(f"   cited from {note['title']}: {note['cited_text']!r}")


if __name__ == "__main__":
    main()
