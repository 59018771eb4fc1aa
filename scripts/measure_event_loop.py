"""How long does the chat model keep an event loop from running? Prints the longest pause of a ticking task for each use.

    python scripts/measure_event_loop.py [--model gemma3-local] [--no-load]

The task wants to run every 2 ms; a pause is what passes between two of its turns beyond that. Linux tells how long the
thread was ready but had no processor, because other threads or programs had them all; "blocked" is the longest rest. The
first line, without the model, is what the machine itself does. The bundle must be installed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from langchain_adapter import ChatGemmaCoreML

TICK_SECONDS = 0.002
SAMPLES = Path(__file__).parent.parent / "tests" / "data"
SCHEMA = {
    "title": "Person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

Pause = tuple[float, float]
"""Seconds, and how many of them the thread was waiting for a processor that other threads or programs had."""
Use = Callable[[ChatGemmaCoreML, str], Awaitable[object]]


async def idle(model: ChatGemmaCoreML, text: str) -> None:
    await asyncio.sleep(2)


async def first_answer(model: ChatGemmaCoreML, text: str) -> None:
    """Without --no-load the bundle is open already."""
    await model.ainvoke("What is the capital of France?")


async def long_prompt(model: ChatGemmaCoreML, text: str) -> None:
    await model.ainvoke(f"{text}\n\nWho is this about?", max_tokens=8)


async def stream(model: ChatGemmaCoreML, text: str) -> None:
    async for _ in model.astream("Tell me about rivers.", max_tokens=64):
        pass


async def events(model: ChatGemmaCoreML, text: str) -> None:
    async for _ in model.astream_events("Tell me about lakes.", version="v2", max_tokens=64):
        pass


async def schema(model: ChatGemmaCoreML, text: str) -> None:
    """With --no-load this makes the grammar's table of the vocabulary."""
    await model.with_structured_output(SCHEMA, include_raw=True).ainvoke("Sherlock Holmes is 33 years old.")


async def many_tasks(model: ChatGemmaCoreML, text: str) -> None:
    await asyncio.gather(*(model.ainvoke(f"What is {n} plus {n}?", max_tokens=8) for n in range(50)))


async def cancelled(model: ChatGemmaCoreML, text: str) -> None:
    tasks = [asyncio.create_task(model.ainvoke(f"{n} {text}", max_tokens=8)) for n in range(4)]
    await asyncio.sleep(1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


USES: dict[str, Use] = {
    "nothing (the machine itself)": idle,
    "first answer": first_answer,
    "a long prompt": long_prompt,
    "a stream of 64 tokens": stream,
    "astream_events v2 of 64 tokens": events,
    "first answer with a JSON schema": schema,
    "50 tasks at once": many_tasks,
    "4 long prompts cancelled": cancelled,
}


def waited_for_processor() -> float:
    """Seconds so far that this thread was ready but no processor took it (Linux; elsewhere 0)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


async def tick(pauses: list[Pause]) -> None:
    before, waited_before = time.perf_counter(), waited_for_processor()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        now, waited = time.perf_counter(), waited_for_processor()
        pauses.append((now - before - TICK_SECONDS, waited - waited_before))
        before, waited_before = now, waited


async def measure(use: Use, model: ChatGemmaCoreML, text: str) -> tuple[list[Pause], float]:
    """The pauses of the ticking task while `use` runs, in seconds, and how long it ran."""
    pauses: list[Pause] = []
    ticking = asyncio.create_task(tick(pauses))
    await asyncio.sleep(0.05)
    pauses.clear()
    started = time.perf_counter()
    await use(model, text)
    ticking.cancel()
    return pauses, time.perf_counter() - started


async def main() -> None:
    parser = argparse.ArgumentParser(description="Longest pauses of an event loop that uses the chat model.")
    parser.add_argument("--model", default="gemma3-local")
    parser.add_argument("--no-load", dest="load", action="store_false", help="do not call load() before the loop runs")
    arguments = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SAMPLES.glob("*.txt")))
    model = ChatGemmaCoreML(model=arguments.model, temperature=0)
    if arguments.load:
        model.load(structured=True)
    worst = 0.0
    print(f"{'use':32} {'seconds':>8} {'longest pause':>15} {'of it no processor':>20} {'blocked':>13}")
    for name, use in USES.items():
        pauses, seconds = await measure(use, model, text)
        longest, busy = max(pauses)
        blocked = max(pause - waited for pause, waited in pauses)
        worst = max(worst, blocked)
        print(f"{name:32} {seconds:8.2f} {1000 * longest:12.1f} ms {1000 * busy:17.1f} ms {1000 * blocked:10.1f} ms", flush=True)
    print(f"Apart from waiting for a processor, the event loop was never blocked for more than {1000 * worst:.1f} ms.")


if __name__ == "__main__":
    asyncio.run(main())
