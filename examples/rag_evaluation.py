"""How often the RAG example is right: questions about Genesis, what was retrieved, what was answered, the rates as they are.

Run: python -m examples.rag_evaluation
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

from examples.long_text import chapters
from examples.rag import ask, build_store, conversation
from langchain_adapter import ChatGemmaCoreML

QUESTIONS = Path(__file__).parent / "data" / "genesis_questions.json"


@dataclass(frozen=True)
class Question:
    """A question with all answers that count as right, and the verse that has it."""

    question: str
    answers: list[str]
    verse: str


@dataclass(frozen=True)
class Result:
    """What came of one question."""

    question: Question
    passages: list[Document]
    answer: str
    without_passages: str

    @property
    def retrieved(self) -> bool:
        """Whether a passage holds one of the answers."""
        text = normalised(" ".join(passage.page_content for passage in self.passages))
        return any(f" {normalised(answer)} " in f" {text} " for answer in self.question.answers)


def questions() -> list[Question]:
    """The held set."""
    return [Question(**entry) for entry in json.loads(QUESTIONS.read_text(encoding="utf-8"))]


def normalised(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: as exact match is counted for SQuAD."""
    words = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def exact(answer: str, expected: Sequence[str]) -> bool:
    """Whether the answer is one of the expected ones and nothing more."""
    return normalised(answer) in [normalised(one) for one in expected]


def contains(answer: str, expected: Sequence[str]) -> bool:
    """Whether the answer holds one of the expected ones."""
    return any(f" {normalised(one)} " in f" {normalised(answer)} " for one in expected)


def evaluate(model: ChatGemmaCoreML, store: VectorStore, asked: Sequence[Question], passages: int = 3) -> list[Result]:
    """Every question with passages, and without any: what the model knows by heart is no merit of the retrieval."""
    results = []
    for question in asked:
        answer = ask(model, store, question.question, passages)
        bare = model.invoke(conversation(question.question))
        results.append(Result(question, answer.passages, answer.message.text.strip(), bare.text.strip()))
    return results


def report(results: Sequence[Result]) -> str:
    """Every question with its answers, then the rates."""
    lines = []
    for number, result in enumerate(results, 1):
        expected = result.question.answers
        mark = "exact" if exact(result.answer, expected) else "contained" if contains(result.answer, expected) else "wrong"
        titles = ", ".join(passage.metadata["title"] for passage in result.passages)
        missed = "" if result.retrieved else " (MISSED)"
        lines += [
            f"{number:2}. {result.question.question}",
            f"    expected: {expected[0]} ({result.question.verse}); retrieved: {titles}{missed}",
            f"    answer:   {result.answer!r} [{mark}]; without passages: {result.without_passages!r}",
        ]

    def rate(name: str, hits: Sequence[bool]) -> str:
        return f"{name}: {sum(hits)} of {len(hits)} ({sum(hits) / max(len(hits), 1):.0%})"

    lines += [
        "",
        rate("retrieved a passage with the answer", [result.retrieved for result in results]),
        rate("exact match", [exact(result.answer, result.question.answers) for result in results]),
        rate("answer contains the expected one", [contains(result.answer, result.question.answers) for result in results]),
        rate("exact match without passages", [exact(result.without_passages, result.question.answers) for result in results]),
        rate("contained without passages", [contains(result.without_passages, result.question.answers) for result in results]),
    ]
    return "\n".join(lines)


def main() -> None:
    model = ChatGemmaCoreML(model="gemma3-local", max_tokens=24, stop=["\n"])
    print(report(evaluate(model, build_store(chapters()), questions())))


if __name__ == "__main__":
    main()
