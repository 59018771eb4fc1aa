"""Prompts for the benchmark of speculation, by kind, made from real texts for a base model to continue."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from llm_gemma_coreml.errors import RequestError

TEXTS = Path(__file__).parents[2] / "tests" / "data"
"""The texts of a source checkout; an installed package does not hold them."""

KINDS = {
    "verbatim": "verbatim copy",
    "quotation": "quotation from a document",
    "rag": "answer from passages",
    "code_edit": "code with a change",
    "json": "extraction from JSON",
    "enumeration": "enumeration",
    "prose": "free prose",
}


@dataclass(frozen=True)
class Case:
    """One prompt; the model continues `text`."""

    kind: str
    text: str


def cases(texts: Path | None = None) -> list[Case]:
    """All prompts, in the order of KINDS. Raises RequestError if the folder `texts` lacks one of the texts."""
    folder = TEXTS if texts is None else texts
    try:
        read = {
            name: (folder / name).read_text(encoding="utf-8")
            for name in (
                "prose_alice.txt",
                "prose_holmes.txt",
                "document_declaration.txt",
                "document_questions.json",
                "code_inventory.py",
                "orders.json",
            )
        }
        questions = json.loads(read["document_questions.json"])
    except (OSError, ValueError) as error:
        raise RequestError(
            f"The benchmark's texts cannot be read ({error}). Give --texts the folder tests/data of the source code."
        ) from error
    document = read["document_declaration.txt"]
    code, orders = read["code_inventory.py"], read["orders.json"]
    alice, holmes = read["prose_alice.txt"].split("\n\n"), read["prose_holmes.txt"].split("\n\n")
    return [
        *(_copy(text) for text in ("\n\n".join(alice[:2]), alice[5], holmes[0])),
        *(_quotation(document, entry) for entry in questions[:3]),
        *(_answer(document, questions, number) for number in (1, 3, 4)),
        *(_code_edit(code, old, new) for old, new in (("quantity", "amount"), ("shelf", "place"))),
        *(_extraction(orders, fields) for fields in (("order", "status"), ("name", "city"))),
        *(Case("enumeration", text) for text in _ENUMERATIONS),
        *(Case("prose", text) for text in _PROSE),
    ]


_ENUMERATIONS = (
    "The twelve months and their number of days:\n1. January has 31 days.\n2. February has 28 days.\n3. March",
    "Capitals of European countries:\n- The capital of France is Paris.\n- The capital of Spain is Madrid.\n- The",
)
_PROSE = (
    "The old lighthouse keeper had not spoken to anyone for weeks. One morning in March,",
    "There are three reasons why people moved from the country to the cities in the nineteenth century. The first",
    "My grandmother used to say that a garden is never finished. When I was seven years old, she",
)


def _copy(text: str) -> Case:
    start = " ".join(text.split()[:4])
    return Case("verbatim", f"The text:\n\n{text}\n\nThe same text once more, word for word:\n\n{start}")


def _quotation(document: str, entry: dict[str, str]) -> Case:
    return Case(
        "quotation",
        f'{document}\n\nQuestion: {entry["question"]}\nThe document answers this in its own words: "{entry["quote"]}',
    )


def _answer(document: str, questions: list[dict[str, str]], number: int) -> Case:
    """Passages, two answered questions as examples, and one to answer."""
    passages = [part for part in document.split("\n\n") if len(part) < 600]
    numbered = "\n".join(f"[{index}] {part}" for index, part in enumerate(passages, 1))
    examples = []
    for entry in [questions[number - 1], questions[number]]:
        place = next((i for i, part in enumerate(passages) if entry["quote"] in part), 0)
        examples.append((entry["question"], f"According to passage [{place + 1}]: {passages[place]}"))
    (first, answer), (second, _) = examples
    return Case("rag", f"{numbered}\n\nQuestion: {first}\nAnswer: {answer}\n\nQuestion: {second}\nAnswer: According to")


def _code_edit(code: str, old: str, new: str) -> Case:
    changed = code.replace(old, new).split("\n")
    start = "\n".join(changed[:14])
    return Case("code_edit", f"# inventory.py\n{code}\n\n# inventory.py, `{old}` is called `{new}` now\n{start}\n")


def _extraction(orders: str, fields: tuple[str, str]) -> Case:
    found = json.loads(orders)
    flat = [{**entry["customer"], **entry} for entry in found]
    lines = [json.dumps({field: entry[field] for field in fields}) for entry in flat]
    start = lines[1][: lines[1].index(":") + 1]
    question = f"Only {fields[0]} and {fields[1]} of each order, one JSON object a line:"
    return Case("json", f"{orders}\n{question}\n{lines[0]}\n{start}")
