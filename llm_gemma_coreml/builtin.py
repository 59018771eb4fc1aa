"""The built-in runtimes and drafters, registered the way a third party's would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from llm_gemma_coreml.hooks import hookimpl

if TYPE_CHECKING:
    from llm_gemma_coreml.drafting.base import DrafterFactory
    from llm_gemma_coreml.runtime.base import Runtime


@hookimpl(tryfirst=True)
def register_runtimes(register: Callable[[Runtime], None]) -> None:
    from llm_gemma_coreml.runtime.coreml import CoreMLRuntime
    from llm_gemma_coreml.runtime.portable import PortableRuntime

    register(CoreMLRuntime())
    register(PortableRuntime())


@hookimpl(tryfirst=True)
def register_drafters(register: Callable[[DrafterFactory], None]) -> None:
    from llm_gemma_coreml.drafting.assistant import AssistantFactory
    from llm_gemma_coreml.drafting.corpus import CorpusLookupFactory
    from llm_gemma_coreml.drafting.prompt_lookup import PromptLookupFactory
    from llm_gemma_coreml.drafting.published import PublishedAssistantFactory

    register(PromptLookupFactory())
    register(CorpusLookupFactory())
    register(AssistantFactory())
    register(PublishedAssistantFactory())
