"""langchain's create_agent on a base model: the grammar makes every call well formed, a middleware says which comes next.

A 270M base model cannot plan. What it can do is fill in arguments, and the grammar lets it write nothing else: so the order
of the tools is ours, the arguments are the model's. With an instruction-tuned model leave the middleware out.

Run: python -m examples.agent
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from examples.agent_tools import TOOLS, earlier_conversation
from langchain_adapter import ChatGemmaCoreML


class FixedPlan(AgentMiddleware):
    """Each model call must call the next tool of the plan; after the last one the model answers in words."""

    def __init__(self, plan: Sequence[str]) -> None:
        super().__init__()
        self.plan = list(plan)

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Choose the tool by how many results there are since the last question."""
        done = 0
        for message in reversed(request.messages):
            if isinstance(message, HumanMessage):
                break
            done += isinstance(message, ToolMessage)
        choice = self.plan[done] if done < len(self.plan) else "none"
        return handler(request.override(tool_choice=choice))


def make_agent(model: ChatGemmaCoreML) -> Any:
    """A compiled graph with the state {"messages": [...]}."""
    return create_agent(model, TOOLS, middleware=[FixedPlan(["price_of", "multiply"])])


def show(messages: Sequence[Any]) -> None:
    """Print a conversation."""
    for message in messages:
        if isinstance(message, AIMessage) and message.tool_calls:
            for call in message.tool_calls:
                print(f"  model calls {call['name']}({', '.join(f'{key}={value!r}' for key, value in call['args'].items())})")
        elif isinstance(message, ToolMessage):
            print(f"  {message.name} -> {message.content}")
        else:
            print(f"  {message.type}: {message.text.strip()}")


def main() -> None:
    model = ChatGemmaCoreML(model="gemma3-local", max_tokens=60, stop=["\n"])
    messages = [*earlier_conversation(), HumanMessage("How much do 5 loaves of bread cost?")]
    show(make_agent(model).invoke({"messages": messages})["messages"][len(messages) - 1 :])


if __name__ == "__main__":
    main()
