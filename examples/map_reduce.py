"""A summary of a document under a token budget: in one prompt (stuff) if it fits, else in parts (map-reduce).

Run: python -m examples.map_reduce [budget in tokens]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_text_splitters import RecursiveCharacterTextSplitter

from examples.long_text import chapters
from langchain_adapter import ChatGemmaCoreML
from langchain_adapter.encoding import gemma_encoding

INSTRUCTION = "The assistant says in one short sentence what happens in each text."
EXAMPLE = (
    "Now there was a famine in the land, and a certain man of Bethlehem went to sojourn in the country of Moab, he, and his "
    "wife, and his two sons.",
    "A man and his family leave Bethlehem for Moab because of a famine.",
)


@dataclass
class Summary:
    """A summary and what it took."""

    text: str
    calls: int = 0
    prompt_tokens: int = 0
    levels: list[int] = field(default_factory=list)
    """How many parts each level of map-reduce had; empty if all was done in one prompt."""


def prompt(text: str) -> list[BaseMessage]:
    """The question about one text."""
    shown = [HumanMessage(f"Text: {EXAMPLE[0]}"), AIMessage(EXAMPLE[1])]
    return [SystemMessage(INSTRUCTION), *shown, HumanMessage(f"Text: {text}")]


def stuff(model: ChatGemmaCoreML, text: str) -> Summary:
    """All in one prompt."""
    return _count(Summary(""), [model.invoke(prompt(text))])


def map_reduce(model: ChatGemmaCoreML, text: str, budget: int) -> Summary:
    """Summaries of parts, joined, until they fit into `budget` tokens of prompt; then the summary of these."""
    overhead = model.get_num_tokens_from_messages(prompt(""))
    if budget < overhead + 64:
        raise SystemExit(f"The budget must be at least {overhead + 64} tokens: the prompt alone takes {overhead}.")
    split = partial(_split, model.model, budget - overhead - 1)
    summary = Summary("")
    while model.get_num_tokens_from_messages(prompt(text)) > budget:
        parts = split(text)
        answers = model.batch([prompt(part) for part in parts])
        _count(summary, answers)
        summary.levels.append(len(parts))
        shorter = "\n".join(answer.text.strip() for answer in answers)
        if len(shorter) >= len(text):
            raise SystemExit("The summaries are no shorter than the text: set a smaller max_tokens.")
        text = shorter
    return _count(summary, [model.invoke(prompt(text))])


def summarise(model: ChatGemmaCoreML, text: str, budget: int) -> Summary:
    """The cheaper way that keeps to the budget."""
    fits = model.get_num_tokens_from_messages(prompt(text)) <= budget
    return stuff(model, text) if fits else map_reduce(model, text, budget)


def _split(model: str, tokens: int, text: str) -> list[str]:
    encoding = gemma_encoding(model)
    splitter = RecursiveCharacterTextSplitter.from_tiktoken_encoder(encoding.name, chunk_size=tokens, chunk_overlap=0)
    return splitter.split_text(text)


def _count(summary: Summary, answers: Sequence[AIMessage]) -> Summary:
    summary.calls += len(answers)
    summary.prompt_tokens += sum(answer.usage_metadata["input_tokens"] for answer in answers if answer.usage_metadata)
    summary.text = answers[-1].text.strip()
    return summary


def main() -> None:
    budget = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    model = ChatGemmaCoreML(model="gemma3-local", max_tokens=40, stop=["\n"])
    text = chapters(last=1)[0].page_content
    print(f"The text has {model.get_num_tokens(text)} tokens; the budget of a prompt is {budget}.")
    for name, summary in (("stuff", stuff(model, text)), ("map-reduce", map_reduce(model, text, budget))):
        print(f"\n{name}: {summary.calls} calls, {summary.prompt_tokens} prompt tokens, parts per level {summary.levels}")
        print(f"  {summary.text}")


if __name__ == "__main__":
    main()
