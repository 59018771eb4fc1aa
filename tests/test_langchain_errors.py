"""What users see of their mistakes: LangChain's own exceptions, which name what was wrong and what to do."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.exceptions import ModelError, ModelInvalidRequestError, ModelNotFoundError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_scripted import MakeModel, bundles, langchain_bundles, make_model  # noqa: F401
from pydantic import ValidationError

from langchain_adapter import ChatGemmaCoreML
from llm_gemma_coreml import errors, loaded


@pytest.fixture(params=["invoke", "ainvoke", "stream", "astream"])
def answer(request: pytest.FixtureRequest) -> Any:
    """Asks in one of the four ways."""

    async def ask(model: ChatGemmaCoreML, messages: Any, **arguments: Any) -> Any:
        if request.param == "invoke":
            return model.invoke(messages, **arguments)
        if request.param == "ainvoke":
            return await model.ainvoke(messages, **arguments)
        if request.param == "stream":
            return list(model.stream(messages, **arguments))
        return [chunk async for chunk in model.astream(messages, **arguments)]

    return ask


WRONG_CALLS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "empty"),
    ([SystemMessage("Be brief.")], {}, "nothing to answer"),
    ("Hello", {"temprature": 1}, "'temprature'. Did you mean 'temperature'"),
    ("Hello", {"quux": 1}, "'quux'. Known: .*max_tokens"),
    ("Hello", {"temperature": -1}, "temperature is -1"),
    ("Hello", {"top_p": 2}, "top_p is 2"),
    ("Hello", {"max_tokens": 0}, "max_tokens is 0"),
    ("Hello", {"seed": "x"}, "seed is 'x'"),
    ("Hello", {"speculate": "perhaps"}, "speculate"),
    ("Hello", {"timeout": 0}, "timeout is 0"),
    ("Hello", {"context": 10**9}, "contexts from 1 to 8192"),
    ("Hello", {"response_format": {"type": "json_schema"}}, "no schema"),
]


@pytest.mark.parametrize(("messages", "arguments", "told"), WRONG_CALLS)
async def test_wrong_calls(make_model: MakeModel, answer: Any, messages: Any, arguments: dict[str, Any], told: str) -> None:  # noqa: F811
    with pytest.raises(ModelInvalidRequestError, match=told) as caught:
        await answer(make_model(("", "ok")), messages, **arguments)
    assert isinstance(caught.value, errors.RequestError)  # code that knows our errors goes on working
    assert not caught.value.is_retryable


def test_wrong_fields() -> None:
    with pytest.raises(ModelInvalidRequestError, match=r"'temprature'\. Did you mean 'temperature'"):
        ChatGemmaCoreML(model="gemma4", temprature=1)  # type: ignore[call-arg]
    for field, value in (("temperature", 11), ("top_k", 0), ("stop", [""]), ("threads", 0), ("timeout", -1), ("ring", "x")):
        with pytest.raises(ValidationError, match=field):
            ChatGemmaCoreML(**{"model": "gemma4", field: value})
    with pytest.raises(ValidationError, match="model"):
        ChatGemmaCoreML()  # type: ignore[call-arg]


def test_parameters_of_remote_models_are_passed_over() -> None:
    model = ChatGemmaCoreML(model="gemma4", api_key="secret", max_retries=2, base_url="x", stop=[])  # type: ignore[call-arg]
    assert "secret" not in repr(model)


async def test_missing_bundles(bundles: Path, answer: Any) -> None:  # noqa: F811
    with pytest.raises(ModelNotFoundError, match=r"'no-such-model'.*base, gemma4"):
        await answer(ChatGemmaCoreML(model="no-such-model"), "Hello")
    with pytest.raises(ModelNotFoundError, match="llm gemma-coreml convert"):
        await answer(ChatGemmaCoreML(model="gemma-4-12b-it"), "Hello")


def test_bundle_by_path_and_damaged(make_model: MakeModel, bundles: Path, tmp_path: Path) -> None:  # noqa: F811
    make_model(("", "ok"))
    assert ChatGemmaCoreML(model=str(bundles / "gemma4"), temperature=0).invoke("Hello").content == "ok"
    (tmp_path / "bundle.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"bundle\.json"):
        ChatGemmaCoreML(model=str(tmp_path)).invoke("Hello")


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if the package were not installed."""
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


def weather(city: str) -> str:
    """Get the weather."""
    return city


def test_missing_extra(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    loaded.unload_all()  # with the grammars made so far
    without(monkeypatch, "llguidance")
    model = make_model(("", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>'))
    for wanting in (
        model.bind_tools([weather], tool_choice="any"),
        model.bind_tools([weather], strict=True),
        model.bind(response_format={"type": "json_object"}),
    ):
        with pytest.raises(ModelError, match=r"pip install 'llm-gemma-coreml\[structured\]'") as caught:
            wanting.invoke("Hello")
        assert isinstance(caught.value, ImportError)
    assert model.bind_tools([weather]).invoke("Hello").tool_calls[0]["args"] == {"city": "Oslo"}
    loaded.unload_all()


def test_missing_langchain() -> None:
    """`from langchain_adapter import ...` without langchain-core says what to install."""
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "try:\n    from langchain_adapter import ChatGemmaCoreML\n"
        "except ImportError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'llm-gemma-coreml[langchain]'" in told


def test_a_closed_engine(make_model: MakeModel) -> None:  # noqa: F811
    model = make_model(("", "ok"), session_memory=12345)
    model._opened().engine.close()
    with pytest.raises(ModelError, match="closed"):
        model.invoke("Hello")
    loaded.unload_all()


def test_init_chat_model(make_model: MakeModel) -> None:  # noqa: F811
    from langchain.chat_models import init_chat_model

    from langchain_adapter import register

    register()
    register()
    make_model(("", "ok"))
    model: Any = init_chat_model("gemma4", model_provider="gemma_coreml", temperature=0)
    assert isinstance(model, ChatGemmaCoreML)
    assert model.invoke([HumanMessage("Hello")]).content == "ok"
    by_prefix: Any = init_chat_model("gemma_coreml:gemma4", temperature=0)
    assert by_prefix.model == "gemma4"
    chosen_later: Any = init_chat_model(model_provider="gemma_coreml", configurable_fields=("model", "temperature"))
    assert chosen_later.invoke("Hello", config={"configurable": {"model": "gemma4"}}).content == "ok"
