"""Many threads and tasks share one model: every answer is its sequential one, and cancelling some leaves the rest right."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.exceptions import ModelTimeoutError
from langchain_scripted import MakeModel, bundles, langchain_bundles, make_model  # noqa: F401
from support import scripted

from langchain_adapter import ChatGemmaCoreML

QUESTIONS = [f"Question {index}: how many?" for index in range(50)]
REPLIES = tuple((f"Question {index}:", f"{index} and {index + 1} make {2 * index + 1}.") for index in range(50))


@pytest.fixture
def model(make_model: MakeModel) -> ChatGemmaCoreML:  # noqa: F811
    return make_model(*REPLIES)


@pytest.fixture
def sequential(model: ChatGemmaCoreML) -> list[str]:
    return [model.invoke(question).text for question in QUESTIONS]


def streamed(model: ChatGemmaCoreML, question: str) -> str:
    return "".join(chunk.text for chunk in model.stream(question))


def test_threads(model: ChatGemmaCoreML, sequential: list[str]) -> None:
    assert sequential[3] == "3 and 4 make 7."
    with ThreadPoolExecutor(8) as pool:
        invoked = list(pool.map(lambda question: model.invoke(question).text, QUESTIONS))
        streams = list(pool.map(lambda question: streamed(model, question), QUESTIONS))
    assert invoked == streams == sequential
    assert [message.text for message in model.batch(QUESTIONS)] == sequential


async def astreamed(model: ChatGemmaCoreML, question: str) -> str:
    return "".join([chunk.text async for chunk in model.astream(question)])


async def test_tasks_some_cancelled(model: ChatGemmaCoreML, sequential: list[str]) -> None:
    """Every third task is cancelled: at once, while it waits, or in the middle of its answer."""
    ways = (astreamed, lambda model, question: model.ainvoke(question))
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(ways[index % 2](model, question))  # type: ignore[operator]
        for index, question in enumerate(QUESTIONS)
    ]
    for index in range(0, 50, 3):
        await asyncio.sleep(0.01)
        tasks[index].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    finished = 0
    for index, answer in enumerate(answers):
        if isinstance(answer, asyncio.CancelledError):
            assert index % 3 == 0
            continue
        assert not isinstance(answer, BaseException)
        assert (answer if isinstance(answer, str) else answer.text) == sequential[index]
        finished += 1
    assert finished >= 33
    assert [(await model.ainvoke(question)).text for question in QUESTIONS[:3]] == sequential[:3]


async def test_a_dropped_stream_frees_the_engine(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    model = make_model(("Long", "one " * 400), ("Short", "done"), delay=0.005)
    async for chunk in model.astream("Long"):
        if chunk.text:
            break
    assert (await model.ainvoke("Short")).text == "done"
    for chunk in model.stream("Long"):
        if chunk.text:
            break
    assert model.invoke("Short").text == "done"
    scripted.script_of(bundles / "gemma4").delay = 0.0


async def test_cancelled_long_answers_stop(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    model = make_model(("Long", "one " * 400), ("Short", "done"), delay=0.005)
    task = asyncio.create_task(model.ainvoke("Long", speculate="off"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    started = time.perf_counter()
    assert (await model.ainvoke("Short")).text == "done"
    assert time.perf_counter() - started < 2.0  # the whole long answer takes as long at least
    scripted.script_of(bundles / "gemma4").delay = 0.0


async def test_timeout(make_model: MakeModel, bundles: Any) -> None:  # noqa: F811
    model = make_model(("Long", "one " * 400), ("Short", "done"), delay=0.01, timeout=0.3, speculate="off")
    with pytest.raises(ModelTimeoutError, match=r"0\.3 s"):
        model.invoke("Long")
    with pytest.raises(ModelTimeoutError):
        await model.ainvoke("Long")
    with pytest.raises(ModelTimeoutError):
        list(model.stream("Long"))
    assert model.invoke("Short", timeout=30).text == "done"
    scripted.script_of(bundles / "gemma4").delay = 0.0


def test_models_share_an_engine(make_model: MakeModel) -> None:  # noqa: F811
    assert make_model()._opened().engine is make_model(temperature=1.0)._opened().engine
    assert make_model(session_memory=1 << 20)._opened().engine is not make_model()._opened().engine
