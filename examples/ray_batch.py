"""Many documents on many machines with Ray: each worker process loads the model once, documents go to whoever is free.

On one machine this gains nothing over `model.batch`, since one model already uses all cores: it is the way past one machine.
Every machine needs the bundle (`llm gemma-coreml models`).

Run: python -m examples.ray_batch [workers]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from langchain_adapter import ChatGemmaCoreML

REVIEWS = [
    "The hinge broke after two days and nobody answered my letters.",
    "A lovely lamp. It lights the whole room and looks beautiful.",
    "It arrived late, the box was torn, and one cup was in pieces.",
    "My children play with it every day; we are very happy.",
]
EXAMPLES = {"It works well, thank you.": "happy", "It never worked, I want my money back.": "angry"}
SCHEMA = {
    "title": "Mood",
    "type": "object",
    "properties": {"mood": {"enum": ["happy", "angry"]}},
    "required": ["mood"],
    "additionalProperties": False,
}


class Worker:
    """One model in one process."""

    def __init__(self, model: str, threads: int | None = None) -> None:
        chat = ChatGemmaCoreML(model=model, threads=threads, max_tokens=24)
        self._mood = chat.with_structured_output(SCHEMA)

    def mood(self, review: str) -> str:
        """happy or angry."""
        messages: list[BaseMessage] = [SystemMessage("The assistant says whether the customer is happy or angry.")]
        for example, mood in EXAMPLES.items():
            messages += [HumanMessage(example), AIMessage(f'{{"mood": "{mood}"}}')]
        answer: Any = self._mood.invoke([*messages, HumanMessage(review)])
        return str(answer["mood"])


def moods(reviews: Sequence[str], model: str = "gemma3-local", workers: int = 1) -> list[str]:
    """The mood of each review, in their order, from `workers` Ray actors. Uses the running cluster or starts one here."""
    import ray
    from ray.util import ActorPool

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(include_dashboard=False, configure_logging=False)
    try:
        remote = ray.remote(num_cpus=1)(Worker)
        pool = ActorPool([remote.remote(model, threads=1) for _ in range(workers)])
        return list(pool.map(lambda actor, review: actor.mood.remote(review), list(reviews)))
    finally:
        if started_here:
            ray.shutdown()


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for review, mood in zip(REVIEWS, moods(REVIEWS, workers=workers), strict=True):
        print(f"{mood}: {review}")


if __name__ == "__main__":
    main()
