"""Answers streamed by an asynchronous web handler: server-sent events, many clients, a client that leaves ends its answer.

Run: python -m examples.web (asks itself two questions at once), or serve it: uvicorn examples.web:app
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from langchain_core.messages import HumanMessage
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from langchain_adapter import ChatGemmaCoreML

MAX_TOKENS = 40


def make_app(model: ChatGemmaCoreML) -> Starlette:
    """GET /ask?question=...: events `data: "piece of text"`, then `event: done` with the token counts."""

    async def events(question: str) -> AsyncIterator[str]:
        total = None
        async for chunk in model.astream([HumanMessage(question)]):
            total = chunk if total is None else total + chunk
            if chunk.text:
                yield f"data: {json.dumps(chunk.text)}\n\n"
        usage = total.usage_metadata if total is not None else None
        yield f"event: done\ndata: {json.dumps(usage)}\n\n"

    async def ask(request: Request) -> Response:
        question = request.query_params.get("question", "").strip()
        if not question:
            return JSONResponse({"error": "Give a question: /ask?question=..."}, status_code=400)
        return StreamingResponse(events(question), media_type="text/event-stream")

    return Starlette(routes=[Route("/ask", ask)])


app = make_app(ChatGemmaCoreML(model="gemma3-local", max_tokens=MAX_TOKENS, stop=["\n"]))


async def ask_both() -> None:
    """Two clients at once, in this process."""
    import httpx

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=None) as client:
        questions = ("What is the capital of Italy?", "Name a colour.")
        answers = await asyncio.gather(*(client.get("/ask", params={"question": question}) for question in questions))
    for question, answer in zip(questions, answers, strict=True):
        print(f"GET /ask?question={question}\n{answer.text.strip()}\n")


if __name__ == "__main__":
    asyncio.run(ask_both())
