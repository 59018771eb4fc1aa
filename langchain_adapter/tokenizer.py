"""A bundle's tokenizer as a transformers tokenizer, for code that wants a PreTrainedTokenizerBase."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from langchain_adapter.bundles import locate
from llm_gemma_coreml.chat.detokenizer import decode as decode_text
from llm_gemma_coreml.chat.tokenizer import WORD_BOUNDARY, Tokenizer
from llm_gemma_coreml.errors import MissingDependencyError, RequestError

try:
    from transformers import BatchEncoding, PreTrainedTokenizer
except ModuleNotFoundError as error:
    raise MissingDependencyError("GemmaCoreMLTokenizer needs transformers: pip install transformers") from error


class GemmaCoreMLTokenizer(PreTrainedTokenizer):
    """`GemmaCoreMLTokenizer.of_bundle("gemma3-local")`: the ids of the bundle's tokenizer, behind transformers' interface.

    Text never becomes a control token, whatever it says (`split_special_tokens` is always on); `<bos>` is added unless
    add_special_tokens is False. Offsets count characters and work with truncation and padding, for single texts and for
    batches. There is no chat template: use ChatGemmaCoreML for chats.
    """

    vocab_files_names = {"vocab_file": "tokenizer.model"}  # noqa: RUF012  # transformers' own form
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str | Path, **options: Any) -> None:
        """vocab_file: a bundle's SentencePiece file. Raises BundleError if it is missing or damaged."""
        self.vocab_file = str(vocab_file)
        self._tokenizer = Tokenizer(vocab_file)
        self._ids = {piece: token for token, piece in enumerate(self._tokenizer.pieces())}
        for name in ("bos", "eos", "unk", "pad"):
            if f"<{name}>" in self._ids:
                options.setdefault(f"{name}_token", f"<{name}>")
        options.setdefault("extra_special_tokens", self._tokenizer.control_names())
        options.setdefault("special_tokens_pattern", "bos")
        options.setdefault("padding_side", "left")
        options.update(split_special_tokens=True, clean_up_tokenization_spaces=False, token_type_ids_pattern="all_zeros")
        super().__init__(**options)  # type: ignore[no-untyped-call]

    @classmethod
    def of_bundle(cls, bundle: str | Path = "gemma3-local", **options: Any) -> GemmaCoreMLTokenizer:
        """The tokenizer of a model (name or alias) or of a bundle's folder. Raises ModelNotInstalledError, BundleError."""
        from llm_gemma_coreml.bundle.manifest import load_manifest

        folder = locate(str(bundle))
        manifest = load_manifest(folder)
        options.setdefault("model_max_length", max(manifest.rungs))
        return cls(folder / manifest.tokenizer, **options)

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self._tokenizer.vocabulary_size

    def get_vocab(self) -> dict[str, int]:
        """Piece -> id; a space is written as U+2581."""
        return dict(self._ids)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Copy the SentencePiece file, for `save_pretrained`."""
        target = Path(save_directory) / ((f"{filename_prefix}-" if filename_prefix else "") + "tokenizer.model")
        if target.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, target)
        return (str(target),)

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """The text of pieces; control tokens by their names."""
        return self._text([self._convert_token_to_id(token) for token in tokens], with_controls=True)

    def tokenize(self, text: str, *args: Any, **options: Any) -> list[str]:
        """The pieces of `text`, none of them a control token."""
        return [self._tokenizer.piece(token) for token in self._tokenizer.encode_text(text)]

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._ids:
            raise RequestError(f"{token!r} is no piece of {self.vocab_file}: write a space as {WORD_BOUNDARY!r}.")
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokenizer.piece(index)

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, *args: Any, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        return self._text(ids, with_controls=not skip_special_tokens)

    def _text(self, ids: Sequence[int], with_controls: bool) -> str:
        if not with_controls:
            return decode_text(self._tokenizer, list(ids))
        parts, run = [], list[int]()
        for token in ids:
            if self._tokenizer.is_control(token):
                parts += [decode_text(self._tokenizer, run), self._tokenizer.piece(token)]
                run = []
            else:
                run.append(token)
        return "".join(parts) + decode_text(self._tokenizer, run)

    def _encode_plus(
        self, text: Any, text_pair: Any = None, *args: Any, return_offsets_mapping: bool = False, **options: Any
    ) -> BatchEncoding:
        if not return_offsets_mapping:
            return super()._encode_plus(text, text_pair, *args, **options)
        batched = isinstance(text, (list, tuple))
        texts = list(text) if batched else [text]
        if text_pair is not None or not all(isinstance(one, str) for one in texts):
            raise RequestError("Offsets are given for texts: not for pairs, ids or texts that are split into words.")
        tensors = options.pop("return_tensors", None)
        encoded = super()._encode_plus(text, None, *args, **options)
        rows = encoded["input_ids"] if batched else [encoded["input_ids"]]
        offsets = [self._offsets(one, row) for one, row in zip(texts, rows, strict=True)]
        data = {**encoded.data, "offset_mapping": offsets if batched else offsets[0]}
        return BatchEncoding(data, tensor_type=tensors, prepend_batch_axis=not batched)

    def _offsets(self, text: str, row: Sequence[int]) -> list[tuple[int, int]]:
        """Start and end in `text` of each id of a row that may be truncated and padded; (0, 0) for added tokens."""
        spans = self._text_offsets(text)
        kept = sum(not self._tokenizer.is_control(token) for token in row)
        spans = spans[len(spans) - kept :] if self.truncation_side == "left" else spans[:kept]
        following = iter(spans)
        return [(0, 0) if self._tokenizer.is_control(token) else next(following) for token in row]

    def _text_offsets(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each token: the characters of which it has at least one byte."""
        starts: list[int] = []  # for each byte, its character
        for place, character in enumerate(text):
            shown = " " if character == WORD_BOUNDARY else character
            starts += [place] * len(shown.encode("utf-8", "replace"))
        spans, end = [], 0
        for token in self._tokenizer.encode_text(text):
            start, end = end, end + len(self._tokenizer.bytes_of(token))
            spans.append((starts[start], starts[end - 1] + 1))
        return spans
