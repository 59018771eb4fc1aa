"""Messages to prompts, and replies to events, by the rules of one bundle's template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_gemma_coreml.bundle.manifest import Manifest, load_manifest
from llm_gemma_coreml.chat import gemma3, gemma4, transcript
from llm_gemma_coreml.chat.json_schema import check_schema
from llm_gemma_coreml.chat.messages import Message, Tool
from llm_gemma_coreml.chat.prompt import Prompt
from llm_gemma_coreml.chat.reply_grammar import MAX_PARALLEL_CALLS, chosen_tools, gemma4_grammar, json_grammar, transcript_grammar
from llm_gemma_coreml.chat.reply_parser import ReplyParser
from llm_gemma_coreml.chat.structured import GrammarCompiler, has_llguidance
from llm_gemma_coreml.chat.template import ChatTemplate, Placeholders
from llm_gemma_coreml.chat.tokenizer import Tokenizer
from llm_gemma_coreml.chat.turns import require_messages
from llm_gemma_coreml.engine.request import TokenConstraint
from llm_gemma_coreml.engine.token_head import require_logits
from llm_gemma_coreml.errors import BundleError

__all__ = ["Chat", "Prompt", "ReplyParser"]

_KINDS = {"transcript": transcript, "gemma3": gemma3, "gemma4": gemma4}
_STOP_NAMES = {
    "transcript": ("<eos>", "<end_of_turn>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
}
_CHANNEL_ENDS = ("<channel|>", "<|turn>", "<turn|>", "<|tool_call>", "<|tool_response>")
_NEEDED = {
    "transcript": ("<bos>", "<eos>"),
    "gemma3": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<bos>", "<eos>", *_CHANNEL_ENDS, "<|channel>", "<tool_call|>", '<|"|>'),
}


class Chat:
    """The chat of one bundle. Reads bundle.json, tokenizer and template; raises BundleError for a bad one.

    Safe to use from several threads; the parsers and constraints that it makes belong to one reply each.
    """

    def __init__(self, bundle_path: str | Path, manifest: Manifest | None = None) -> None:
        folder = self.folder = Path(bundle_path)
        self.manifest = manifest or load_manifest(folder)
        kind = self.manifest.template_kind
        if kind not in _KINDS:
            raise BundleError(f"{folder}: unknown template kind {kind!r}. Use a newer version of this package.")
        self.kind = kind
        self.tokenizer = Tokenizer(folder / self.manifest.tokenizer)
        for name in _NEEDED[kind]:
            self.tokenizer.control_id(name)
        self._template = ChatTemplate.read(self._template_path(), self.tokenizer)
        names = _STOP_NAMES[kind]
        found = {token for name in names if (token := self.tokenizer.find_control(name)) is not None}
        self.stop_ids = frozenset(self.manifest.stop_ids) | found
        self._compiler = GrammarCompiler(self.tokenizer, self.manifest.vocabulary_size, self.stop_ids)

    def _template_path(self) -> Path:
        """The checkpoint's template; for base models, which have none, ours of this release.

        A transcript belongs to the code that fills and parses it: the copy in an older bundle may not fit it any more.
        """
        if self.kind == "transcript":
            return Path(__file__).parent / "templates" / "transcript.jinja"
        return self.folder / self.manifest.chat_template

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        parallel_calls: bool = True,
        thinking: bool = False,
        schema: object | None = None,
    ) -> Prompt:
        """The prompt that asks for the next assistant message.

        tool_choice: "auto", "any" (some tool must be called), "none", or the name of a tool that must be called.
        parallel_calls: False allows one call per reply. schema: a JSON schema that the reply must satisfy.
        Raises RequestError for what cannot be asked.
        """
        no_calls = tool_choice == "none" and bool(tools)
        tools = chosen_tools(tools, tool_choice)
        for tool in tools:
            check_schema(tool.parameters, f"The schema of tool {tool.name!r}")
        checked = None if schema is None else check_schema(schema)
        ids = self._token_ids(messages, tools, thinking, schema)
        in_reasoning = self._ends_in_reasoning(ids)
        must_call = tool_choice not in ("auto", "none")
        most_calls = 0 if no_calls else MAX_PARALLEL_CALLS if parallel_calls else 1
        return Prompt(
            token_ids=tuple(ids),
            stop_ids=self.stop_ids,
            stop_strings=transcript.stop_strings(tools) if self.kind == "transcript" else (),
            starts_in_reasoning=in_reasoning,
            tools=tools,
            constraint=self._constraint(tools, must_call, most_calls, checked, thinking, in_reasoning),
            schema=schema,
        )

    def prompt_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        thinking: bool = False,
        schema: object | None = None,
    ) -> str:
        """The prompt as text, for people."""
        require_messages(messages)
        placeholders = Placeholders()
        return self._template.text(placeholders, self._context(placeholders, messages, tools, thinking, schema))

    def prompt_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        thinking: bool = False,
        schema: object | None = None,
    ) -> list[int]:
        """The token ids of `prompt` with these arguments, `<bos>` included, without making a grammar."""
        return self._token_ids(messages, chosen_tools(tools, tool_choice), thinking, schema)

    def prepare_grammars(self) -> None:
        """Make the table of the vocabulary that grammars need, which takes a second or so, before it is needed.

        Raises MissingDependencyError without llguidance.
        """
        self._compiler.prepare()

    def reply_parser(self, prompt: Prompt, stop: Sequence[str] = ()) -> ReplyParser:
        """A parser for the reply to `prompt`; stop: strings that end the visible text."""
        return ReplyParser(self.tokenizer, prompt, stop, transcript=self.kind == "transcript")

    def stop_check(self, prompt: Prompt, stop: Sequence[str] = ()) -> Callable[[int], bool] | None:
        """For the engine: True at the token that completes a stop string; None if there are no stop strings."""
        if not stop and not prompt.stop_strings:
            return None
        parser = self.reply_parser(prompt, stop)

        def check(token: int) -> bool:
            parser.feed((token,))
            return parser.stopped

        return check

    def _token_ids(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool, schema: object | None) -> list[int]:
        require_messages(messages)
        placeholders = Placeholders()
        context = self._context(placeholders, messages, tools, thinking, schema)
        ids = self._template.token_ids(placeholders, context)
        return gemma4.open_model_turn(ids, self.tokenizer) if self.kind == "gemma4" else ids

    def _constraint(
        self,
        tools: Sequence[Tool],
        must_call: bool,
        most_calls: int,
        schema: Mapping[str, Any] | None,
        thinking: bool,
        in_reasoning: bool,
    ) -> TokenConstraint | None:
        forbids_calls = self.kind == "gemma4" and most_calls == 0  # other models' calls are text, and stay it
        if schema is None and not tools and not forbids_calls:
            return None
        if self.manifest.head_output != "logits":
            if schema is not None:
                require_logits(self.manifest, "keeping to a JSON schema", "no schema")
            if must_call:
                require_logits(self.manifest, "forcing a tool call", "tools that the model may choose to call")
            return None
        if schema is None and not must_call and not has_llguidance():
            return None  # calls are only checked after they are written
        if self.kind == "gemma4":
            grammar = gemma4_grammar(self.tokenizer, tools, must_call, most_calls, schema, thinking, in_reasoning)
        else:
            build = transcript_grammar if self.kind == "transcript" else json_grammar
            grammar = build(tools, must_call, most_calls, schema)
        what = "the JSON schema" if schema is not None else "the schemas of the tools"
        return self._compiler.constraint(grammar, what)

    def _context(
        self,
        placeholders: Placeholders,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        thinking: bool,
        schema: object | None,
    ) -> dict[str, Any]:
        if self.kind == "gemma4":
            context = gemma4.context(placeholders, messages, tools, thinking, schema)
        else:
            context = _KINDS[self.kind].context(placeholders, messages, tools, schema)
        return {"bos_token": "<bos>", "eos_token": "<eos>", **context}

    def _ends_in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether the last channel that the prompt opens in its last turn is still open."""
        if self.kind != "gemma4":
            return False
        opening = self.tokenizer.control_id("<|channel>")
        others = {self.tokenizer.control_id(name) for name in _CHANNEL_ENDS}
        return next((token == opening for token in reversed(ids) if token == opening or token in others), False)
