"""ChatGemmaCoreML: the LangChain chat model over the engine of one bundle, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import BaseModel, ConfigDict, Field, model_validator

from langchain_adapter import answering, bundles
from langchain_adapter.call import Call, read_call, refuse_unknown
from langchain_adapter.exceptions import as_langchain_errors
from langchain_adapter.pinning import Document, PinnedPrefix, as_messages, common_ids, pin
from langchain_adapter.replies import PROVIDER
from langchain_adapter.structured_output import structured_runnable
from langchain_adapter.tools import converted_tools, neutral_choice
from llm_gemma_coreml import loaded
from llm_gemma_coreml.settings import GenerationSettings

_REMOTE_ONLY = ("api_key", "max_retries", "base_url")
"""Parameters of remote models that code passes to every model: there is nothing to authorise or to try again here."""


class ChatGemmaCoreML(GenerationSettings, BaseChatModel):
    """Gemma from Core ML packages, in this process.

    `ChatGemmaCoreML(model="gemma3-local")`. Every setting can also be given with a call or with `bind`. The bundle is
    opened with the first call; models with the same bundle and engine options share one engine, which answers one
    call after the other and keeps the K/V of earlier prompts.
    """

    model: str
    """Name or alias of an installed bundle as `llm` knows it, or the path of a bundle's folder."""
    thinking: bool = False
    """Let the model think before it answers, if it can (Gemma 4)."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds for one answer, waiting for others included; then ModelTimeoutError. Default: no limit."""
    streaming: bool = False
    """Let `invoke` run over the stream, so that callbacks see each token."""
    runtime: str | None = None
    """Name of the runtime; default: the first that works here."""
    threads: int | None = Field(default=None, ge=1)
    """Threads that compute; default: as the runtime chooses."""
    exact: bool = False
    """fp32 activations: slow, for comparisons."""
    ring: Literal["exact", "as-published"] | None = None
    """For bundles in the published layout: exact (default), or as the bundle's author runs it."""
    drafting: Literal["transformers", "as-published"] | None = None
    """For bundles in the published layout: how the drafter is driven; never changes the text."""
    session_memory: int | None = Field(default=None, ge=0)
    """Bytes of K/V that may be kept between calls; default: a quarter of the memory, at most 4 GB."""

    model_config = ConfigDict(protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {key: value for key, value in values.items() if key not in _REMOTE_ONLY}
        if "model_name" in values:
            values.setdefault("model", values.pop("model_name"))
        refuse_unknown(values, tuple(cls.model_fields))
        if values.get("stop") == []:
            values["stop"] = None
        return values

    # What it is

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that decides what is answered, and its form: the key of LangChain's cache."""
        return self._identity(self.model)

    def _identity(self, model: str) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in GenerationSettings.model_fields}
        return {
            "model": model,
            "weights": bundles.weights_identity(model),
            **settings,
            "thinking": self.thinking,
            "runtime": self.runtime,
            "exact": self.exact,
            "ring": self.ring,
            "output_version": self.output_version,
        }

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        params: dict[str, Any] = super()._get_invocation_params(stop=stop, **kwargs)
        params["stop"] = self.stop if stop is None else stop
        if isinstance(kwargs.get("model"), str):
            params["weights"] = bundles.weights_identity(kwargs["model"])
        return params

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        def value(name: str) -> Any:
            given = kwargs.get(name)
            return getattr(self, name) if given is None else given

        params = LangSmithParams(ls_provider=PROVIDER, ls_model_name=str(value("model")), ls_model_type="chat")
        if value("temperature") is not None:
            params["ls_temperature"] = value("temperature")
        if value("max_tokens") is not None:
            params["ls_max_tokens"] = value("max_tokens")
        stops = stop if stop is not None else self.stop
        if stops:
            params["ls_stop"] = list(stops)
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        return bundles.profile(self.model, self.context)

    # Answers

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with as_langchain_errors():
            message = self._prepare(messages, stop, kwargs).message()
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with as_langchain_errors():
            answer = await answering.in_thread(self._prepare, messages, stop, kwargs)
            message = await answer.amessage()
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with as_langchain_errors():
            for chunk in self._prepare(messages, stop, kwargs).chunks():
                yield ChatGenerationChunk(message=chunk)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with as_langchain_errors():
            answer = await answering.in_thread(self._prepare, messages, stop, kwargs)
            async for chunk in answer.achunks():
                yield ChatGenerationChunk(message=chunk)

    def _prepare(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, arguments: dict[str, Any]
    ) -> answering.Answer:
        call = self._call(messages, stop, arguments)
        return answering.prepare(self._opened(call.model), call, blocks=self.output_version == "v1")

    def _call(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        arguments: dict[str, Any],
        counting: bool = False,
    ) -> Call:
        fields = {name: getattr(self, name) for name in (*GenerationSettings.model_fields, "model", "thinking", "timeout")}
        return read_call(fields, messages, stop, arguments, counting)

    def _opened(self, model: str | None = None) -> loaded.LoadedBundle:
        """The open bundle; opened now if need be, which takes a second or more."""
        mode = loaded.published_mode(self.ring, self.drafting)
        options = loaded.EngineOptions(self.runtime, self.threads, self.exact, self.session_memory, mode)
        opened = loaded.load(bundles.locate(self.model if model is None else model), options)
        if self.profile is None and model in (None, self.model):  # the bundle was built only now
            self.profile = self._resolve_model_profile()
        return opened

    def load(self, structured: bool = False) -> None:
        """Open the bundle now, and compute a few tokens, so that the first answer is as fast as the others.

        structured: also make the table of the vocabulary that schemas and tools need. Servers call this before their
        event loop runs: native code that is entered once (the table, the runtime's sessions) lets no other thread run
        while it works, and so would keep the loop waiting although it runs in a thread of its own.
        """
        with as_langchain_errors():
            opened = self._opened()
            if structured:
                opened.chat.prepare_grammars()
            warm_up = "Warm up. " * (2 * max(opened.chat.manifest.widths) // 3)
            answering.prepare(opened, self._call([HumanMessage(warm_up)], None, {"max_tokens": 8}), blocks=False).message()

    # Tools and schemas

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools.

        tool_choice: "auto" (default), "any", "none" or a tool's name, in any usual form. strict: schemas are converted
        with every property required and none beyond them; calls follow the schemas in any case if the extra
        `structured` is installed. parallel_tool_calls: False allows one call per answer. response_format: a schema
        for the answers that are no calls. Raises InvalidRequestError for tools that cannot be converted.
        """
        given = {
            "tools": converted_tools(tools, strict),
            "tool_choice": None if tool_choice is None else neutral_choice(tool_choice),
            "strict": strict,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        return self.bind(**{key: value for key, value in given.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """A runnable whose answers follow `schema`: a pydantic class (v1 or v2), a TypedDict, a JSON schema or a function.

        method: "json_schema" (the answer is JSON that the grammar holds to the schema), "function_calling" (a forced
        call), "json_mode" (as json_schema; without a schema any JSON object). include_raw: the result is a dict with
        raw, parsed and parsing_error. tools: tools that may be called instead of an answer (not with function_calling).
        Raises InvalidRequestError; the runnable raises OutputParserException for an answer that does not fit.
        """
        return structured_runnable(self, schema, method, include_raw, strict, kwargs)

    # Tokens

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of `text` by itself, without `<bos>` and without a template."""
        with as_langchain_errors():
            return self._opened().chat.tokenizer.encode_text(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any) -> int:
        """How many tokens the prompt has with which these messages (and tools) would be answered: exactly those that
        the engine would read, the template's own included. kwargs: as for a call (response_format, thinking ...)."""
        if not messages:
            return 0
        with as_langchain_errors():
            arguments = {**kwargs, "tools": tools}
            return len(
                self._call(convert_to_messages(messages), None, arguments, counting=True).prompt_ids(
                    self._opened(kwargs.get("model"))
                )
            )

    # Long documents

    def pin(self, document: Document, tools: Sequence[Any] | None = None, **kwargs: Any) -> PinnedPrefix:
        """Compute what prompts begin with once, and keep it until `unpin`, however many other prompts come between.

        document: a text (then the prompts' SystemMessage is this text) or the messages with which the prompts begin.
        tools, kwargs: as the calls will give them, since tools are part of the prompt. Blocks until it is computed.
        Raises ContextOverflowError, and InvalidRequestError if it exceeds session_memory.
        """
        with as_langchain_errors():
            opened = self._opened(kwargs.get("model"))
            arguments = {**kwargs, "tools": tools}
            ids = common_ids(as_messages(document), lambda messages: self._call(messages, None, arguments).prompt_ids(opened))
            return pin(opened.engine, ids)

    async def apin(self, document: Document, tools: Sequence[Any] | None = None, **kwargs: Any) -> PinnedPrefix:
        """`pin` without blocking the event loop."""
        return await asyncio.to_thread(self.pin, document, tools, **kwargs)
