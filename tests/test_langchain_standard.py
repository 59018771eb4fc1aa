"""LangChain's standard suites over scripted replies: engine, speculation, grammar, parser and adapter are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_scripted import bundles, langchain_bundles  # noqa: F401
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from scripted_llm import replies_by_text
from support import scripted

from langchain_adapter import ChatGemmaCoreML
from llm_gemma_coreml.chat.tokenizer import Tokenizer

QUOTE = '<|"|>'
JOKE = '{"setup": "Why did the cat sit on the computer?", "punchline": "To keep an eye on the mouse."}'


def tool_call(name: str, arguments: str = "") -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


def customer(name: str) -> str:
    return tool_call("unicode_customer", f"customer_name:{QUOTE}{name}{QUOTE},description:{QUOTE}{name}{QUOTE}")


REPLIES = (
    ("Hello", "Hello! How can I help you today?"),
    ("Hey", "Hey there."),
    ("example_user: hello", "Hello, user."),
    ("\nhello", "Hello to you too."),
    ("\nhi", "Hi, how are you?"),
    ("how are you", "I am fine, thank you."),
    ("Well, thanks.", "Good to hear."),
    ("Think it over.", "<|channel>thought\nIt is a question about 2 and 2.\n<channel|>It is 4."),
    ("magic_function(3)", tool_call("magic_function", "input:3")),
    ("magic_function_no_args()", tool_call("magic_function_no_args")),
    ("generate a Pirate greeting", tool_call("greeting_generator", f"answer_style:{QUOTE}pirate{QUOTE}")),
    ('{"result": 3}', "1 + 2 is 3."),
    ("Missing required argument", tool_call("my_adder_tool", "a:1,b:2")),
    ("What is 3 + 4", tool_call("my_adder_tool", "a:3,b:4")),
    ("Tell me a joke about cats.", JOKE),
    ("joke about cats, no punchline", '{"setup": "Why did the cat cross the road?"}'),
    ("include the punchline", JOKE),
    ("nothing other than JSON", JOKE),
    ("a great pick!", "Purple goes with everything."),
    ("weather in San Francisco", tool_call("get_weather", f"location:{QUOTE}San Francisco, CA{QUOTE}")),
    ("It's sunny.", "It is sunny in San Francisco."),
    ("a Chinese technology", customer("你好啊集团")),
    ("a Japanese company", customer("こんにちは株式会社")),
)


def replies(tokenizer: Tokenizer) -> Callable[[tuple[int, ...]], str]:
    """What the model says. To a plain greeting with tools it calls one of those that the prompt declares."""
    by_text = replies_by_text(tokenizer, REPLIES)
    declared = {
        name: replies_by_text(tokenizer, [(f"declaration:{name}", name)]) for name in ("get_weather", "magic_function")
    }

    def reply(prompt: tuple[int, ...]) -> str:
        answer = by_text(prompt)
        if answer.startswith("Hello!"):
            if declared["get_weather"](prompt) == "get_weather":
                return tool_call("get_weather", f"location:{QUOTE}Oslo{QUOTE}")
            if declared["magic_function"](prompt) == "magic_function":
                return tool_call("magic_function", "input:1")
        return answer

    return reply


@pytest.fixture
def scripted_models(bundles: Path) -> None:  # noqa: F811
    """Both bundles answer from the same script."""
    tokenizer = Tokenizer(bundles / "gemma4" / "tokenizer.model")
    for name in ("gemma4", "gemma4-other"):
        script = scripted.script_of(bundles / name)
        script.replies, script.delay = replies(tokenizer), 0.0


@pytest.mark.usefixtures("scripted_models")
class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatGemmaCoreML

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "gemma4"}

    @property
    def supports_json_mode(self) -> bool:
        return True


Details = dict[Literal["invoke", "stream"], list[Any]]


@pytest.mark.usefixtures("scripted_models")
class TestIntegration(ChatModelIntegrationTests):
    """Left off: images, PDF and audio, which the model cannot see; cache_creation, since nothing is paid for."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatGemmaCoreML

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "gemma4"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "gemma4-other"

    @property
    def supported_usage_metadata_details(self) -> Details:
        return {kind: ["reasoning_output", "cache_read_input"] for kind in ("invoke", "stream")}

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self._answer(ChatGemmaCoreML(model="gemma4", thinking=True), "What is 2 and 2? Think it over.", stream)

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatGemmaCoreML(model="gemma4")
        question = "One question, asked twice. " * 20 + "Hello"
        self._answer(model, question, stream)
        return self._answer(model, question, stream)

    def _answer(self, model: ChatGemmaCoreML, text: str, stream: bool) -> AIMessage:
        if not stream:
            return model.invoke(text)
        chunks = list(model.stream(text))
        return chunks[0] + chunks[1:]  # type: ignore[no-any-return,operator]


class TestIntegrationByCalls(TestIntegration):
    """The same with structured output by forced calls."""

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
