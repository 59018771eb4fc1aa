"""How fast the tiktoken encoding is against the bundle's own tokenizer and, if given, a tokenizer.json: ratios by kind of text.

Run: python scripts/measure_encoding.py [--model NAME] [--tokenizer-json FILE] [--text FILE ...]
Every text is first checked to give the same ids (SentencePiece against tiktoken); a difference ends the run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from langchain_adapter.bundles import locate
from langchain_adapter.encoding import GemmaEncoding
from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.chat.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
SIZE = 200_000
"""Characters of each text; shorter ones are repeated."""
ROUNDS = 7


def texts(files: list[str]) -> dict[str, str]:
    """Texts by name."""
    data = ROOT / "tests" / "data"
    lines = (data / "languages.tsv").read_text(encoding="utf-8").splitlines()
    sentences = dict(line.split("\t", 1) for line in lines)
    found = {
        "code (this project)": "".join(
            path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("llm_gemma_coreml/**/*.py"))
        ),
        "English prose": "".join(path.read_text(encoding="utf-8") for path in sorted(data.glob("prose_*.txt"))),
        "over 100 languages": "\n".join(sentences.values()),
        "German, French, Spanish": "\n".join(sentences[name] for name in ("de", "fr", "es")),
        "Russian, Greek": "\n".join(sentences[name] for name in ("ru", "el")),
        "Chinese, Japanese": "\n".join(sentences[name] for name in ("zh", "zh-Hant", "ja", "yue")),
        "Korean": sentences["ko"],
        "Arabic, Hebrew": "\n".join(sentences[name] for name in ("ar", "he")),
        "Hindi, Thai": "\n".join(sentences[name] for name in ("hi", "th")),
    }
    found |= {name: Path(name).read_text(encoding="utf-8") for name in files}
    return {name: (text + "\n") * (SIZE // (len(text) + 1) + 1) for name, text in found.items()}


def encode_all(tokenizer: Any, text: str) -> list[int]:
    """The ids by Hugging Face's tokenizers."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def fastest(function: Callable[[], object]) -> float:
    """Seconds of the fastest round."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-local")
    parser.add_argument("--tokenizer-json")
    parser.add_argument("--text", nargs="*", default=[])
    arguments = parser.parse_args()
    folder = locate(arguments.model)
    path = folder / load_manifest(folder).tokenizer
    own = Tokenizer(path)
    start = time.perf_counter()
    encoding = GemmaEncoding("measured", path)
    print(f"making the encoding: {time.perf_counter() - start:.1f} s, once in a process")
    other = None
    if arguments.tokenizer_json:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        other = HuggingFaceTokenizer.from_file(arguments.tokenizer_json)
    print(f"{'times as fast as':24} {'SentencePiece':>14} {'tokenizers' if other else ''}")
    for name, text in texts(arguments.text).items():
        if encoding.encode(text) != own.encode_text(text):
            raise SystemExit(f"{name}: the ids differ")
        ours = fastest(partial(encoding.encode, text))
        ratio = f"{fastest(partial(own.encode_text, text)) / ours:13.2f}x"
        if other:
            ratio += f" {fastest(partial(encode_all, other, text)) / ours:9.2f}x"
        print(f"{name:24} {ratio}")


if __name__ == "__main__":
    main()
