"""An answer that is given up in whatever way frees the engine at once, and the next prompt is answered."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import llm
import pytest
from plugin_environment import ChildLlm, register_plugin
from scripted_llm import (
    BASE,
    SetScript,
    empty_log,
    llm_folder,
    script,
    scripted_bundles,
    write_base_bundle,
)

__all__ = ["empty_log", "llm_folder", "script", "scripted_bundles"]

LONG = " word" * 400
DELAY = 0.1
SOON = 20.0
"""Seconds: far above what stopping takes, far below what LONG takes."""


@pytest.fixture(autouse=True)
def plugin() -> None:
    register_plugin()


@pytest.fixture
def slow(script: SetScript) -> None:
    script(("endless", LONG), ("short", " yes"), delay=DELAY)


def answered_soon() -> bool:
    start = time.monotonic()
    assert llm.get_model(BASE).prompt("short").text() == "yes"
    return time.monotonic() - start < SOON


def test_a_generator_that_is_closed(slow: None) -> None:
    chunks = iter(llm.get_model(BASE).prompt("endless"))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert answered_soon()


def test_a_response_that_is_dropped(slow: None) -> None:
    chunks = iter(llm.get_model(BASE).prompt("endless"))
    next(chunks)
    del chunks
    assert answered_soon()


def test_an_exception_in_the_callers_loop(slow: None) -> None:
    def read() -> None:
        for _ in llm.get_model(BASE).prompt("endless"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read()
    assert answered_soon()


def test_what_was_given_up_is_reported(slow: None) -> None:
    response = llm.get_model(BASE).prompt("endless")
    chunks = iter(response)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert response.response_json["finish_reason"] == "cancelled"
    assert 0 < response.output_tokens < 400


async def test_a_cancelled_task(slow: None) -> None:
    async def read() -> None:
        async for _ in llm.get_async_model(BASE).prompt("endless"):
            started.set()

    started = asyncio.Event()
    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(SOON):
        assert await llm.get_async_model(BASE).prompt("short").text() == "yes"


async def test_an_async_stream_that_is_left(slow: None) -> None:
    response = llm.get_async_model(BASE).prompt("endless")
    events = response.astream_events()
    await anext(events)
    await events.aclose()
    async with asyncio.timeout(SOON):
        assert await llm.get_async_model(BASE).prompt("short").text() == "yes"


async def test_the_loop_is_never_blocked(slow: None) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    response = llm.get_async_model(BASE).prompt("endless", max_tokens=20, speculate="off")
    await response.text()
    ticking.cancel()
    # 20 calls of 0.1 s: a blocked loop would tick at most once a call.
    assert len(gaps) > 30


async def test_two_answers_at_once(script: SetScript) -> None:
    script(("left", " L one two three"), ("right", " R one two three"))
    model = llm.get_async_model(BASE)
    left, right = await asyncio.gather(model.prompt("left").text(), model.prompt("right").text())
    assert (left, right) == ("L one two three", "R one two three")


@pytest.fixture(scope="session")
def child_bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("child")
    # The first reply is for the plugin's own call, which warms the model up.
    write_base_bundle(folder / "slow", ["", LONG, " still here"], delay=DELAY)
    write_base_bundle(folder / "quick", ["", " yes"])
    return folder


@pytest.fixture
def child(llm_folder: Path, child_bundles: Path) -> ChildLlm:
    for bundle in child_bundles.iterdir():
        (llm_folder / "gemma-coreml" / bundle.name).symlink_to(bundle, target_is_directory=True)
    return ChildLlm(llm_folder, runtime_plugin="support.scripted")


def first_output(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read(4)


@pytest.mark.parametrize("how", [[], ["--async"]])
def test_ctrl_c_ends_the_command(child: ChildLlm, how: list[str]) -> None:
    process = child.start("-m", "coreml/slow", "Go on", *how)
    assert process.stdin is not None
    process.stdin.close()
    assert first_output(process) == "word"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    assert time.monotonic() - start < SOON
    done = child.run("-m", "coreml/quick", "Hello")
    assert (done.returncode, done.stdout) == (0, "yes\n")


CTRL_C_THEN_AGAIN = """
import os, signal, sys, threading
import llm
from llm.plugins import load_plugins

load_plugins()
model = llm.get_model("coreml/slow")
seen = []
try:
    for chunk in model.prompt("Go on"):
        seen.append(chunk)
        if len(seen) == 3:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    print("interrupted after", len(seen) < 300)
print(model.prompt("And now?").text())
"""


def test_ctrl_c_then_again_in_one_process(child: ChildLlm) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_THEN_AGAIN],
        env=child.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "interrupted after True\nstill here\n", done.stderr


def test_stdout_and_stderr_of_a_real_process(child: ChildLlm) -> None:
    done = child.run("-m", "coreml/quick", "Hello", "-u")
    assert done.stdout == "yes\n"
    assert "Token usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_piped_chat_in_a_real_process(child: ChildLlm) -> None:
    done = child.run("chat", "-m", "coreml/quick", text="Hello\nquit\n")
    assert done.returncode == 0, done.stderr
    assert "yes" in done.stdout
    assert done.stderr == ""


def test_a_long_fragment_and_no_stream_in_a_real_process(child: ChildLlm, tmp_path: Path) -> None:
    long_file = tmp_path / "long.txt"
    long_file.write_text("All work and no play. " * 300)
    done = child.run("-m", "coreml/quick", "-f", str(long_file), "What is it?", "--no-stream")
    assert (done.returncode, done.stdout, done.stderr) == (0, "yes\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "coreml/quick", "Hello", "-o", "temperature", "hot"], "temperature"),
        (["-m", "coreml/gone", "Hello"], "coreml/gone"),
    ],
)
def test_errors_of_a_real_process_are_on_stderr(child: ChildLlm, arguments: list[str], said: str) -> None:
    done = child.run(*arguments)
    assert done.returncode != 0
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_traceback(child: ChildLlm) -> None:
    process = child.start("-m", "coreml/slow", "Go on")
    assert process.stdin is not None
    process.stdin.close()
    first_output(process)
    assert process.stdout is not None
    process.stdout.close()
    process.wait(timeout=60)
    assert process.stderr is not None
    assert "llm_gemma_coreml" not in process.stderr.read()
