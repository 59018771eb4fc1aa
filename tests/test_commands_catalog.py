"""The command group without a model: which bundles there are, what they are called, how they go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_environment import ChildLlm, fake_bundle, run_llm


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def model_aliases() -> dict[str, str]:
    import llm

    found = {}
    for entry in llm.get_models_with_aliases():
        for alias in entry.aliases:
            found[alias] = entry.model.model_id
    return found


def test_quick_start_is_there_before_it_is_built() -> None:
    run_llm("models")
    assert model_aliases()["gemma3-local"] == "coreml/gemma3-270m-base"


def test_gemma4_without_a_bundle_names_the_commands() -> None:
    result = run_llm("-m", "gemma4-local", "Hello")
    assert result.exit_code == 1
    assert "llm gemma-coreml convert" in str(result.output)
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_installed_bundle_takes_over_the_alias(user_folder: Path) -> None:
    fake_bundle(user_folder, "gemma-4-big", "gemma4", "gemma4")
    run_llm("models")
    assert model_aliases()["gemma4-local"] == "coreml/gemma-4-big"
    import llm

    assert "thinking" in llm.get_model("gemma4-local").Options.model_fields
    assert "thinking" not in llm.get_model("gemma3-local").Options.model_fields


def test_default_moves_the_alias(user_folder: Path) -> None:
    fake_bundle(user_folder, "gemma-3-one")
    fake_bundle(user_folder, "gemma-3-two")
    assert model_aliases()["gemma3-local"] == "coreml/gemma3-270m-base"
    result = run_llm("gemma-coreml", "default", "gemma-3-two")
    assert (result.exit_code, result.stdout) == (0, "")
    assert model_aliases()["gemma3-local"] == "coreml/gemma-3-two"
    assert "gemma3-local: coreml/gemma-3-two" in run_llm("gemma-coreml", "default").stdout
    run_llm("gemma-coreml", "remove", "gemma-3-two", "-y")
    assert model_aliases()["gemma3-local"] == "coreml/gemma3-270m-base"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"gemma3-local": 3}', '{"gemma3-local": "gone"}', "\xff"])
def test_a_broken_alias_file_breaks_nothing(user_folder: Path, text: str) -> None:
    fake_bundle(user_folder, "gemma-3-one")
    (user_folder / "gemma-coreml" / "aliases.json").write_bytes(text.encode("latin-1"))
    assert run_llm("models").exit_code == 0
    assert model_aliases()["gemma3-local"] == "coreml/gemma3-270m-base"


def test_an_unreadable_bundle_breaks_no_other_command(user_folder: Path) -> None:
    path = fake_bundle(user_folder, "broken")
    (path / "bundle.json").write_text("{")
    assert run_llm("models").exit_code == 0
    listed = run_llm("gemma-coreml", "models", "--json")
    assert "bundle.json" in json.loads(listed.stdout)[0]["problem"]
    result = run_llm("-m", "coreml/broken", "Hello")
    assert result.exit_code == 1
    assert "bundle.json" in result.output


def test_models_lists_bundles_and_what_could_be_one(user_folder: Path) -> None:
    fake_bundle(user_folder, "gemma-3-one")
    facts = json.loads(run_llm("gemma-coreml", "models", "--json").stdout)
    assert [(bundle["name"], bundle["bytes"], bundle["aliases"]) for bundle in facts] == [("gemma-3-one", 2_000_000, [])]
    text = run_llm("gemma-coreml", "models").stdout
    assert "coreml/gemma-3-one: 2 MB" in text
    assert "pip install 'llm-gemma-coreml[quickstart]'" in text


def test_output_that_nobody_reads_to_its_end_is_no_error(user_folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "llm", "gemma-coreml", "models"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Error" not in done.stderr
    assert done.returncode == 1


def test_remove_asks_first(user_folder: Path) -> None:
    path = fake_bundle(user_folder, "gemma-3-one")
    assert run_llm("gemma-coreml", "remove", "gemma-3-one", text="n\n").exit_code == 1
    assert path.exists()
    result = run_llm("gemma-coreml", "remove", "gemma-3-one", text="y\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert not path.exists()


@pytest.mark.parametrize("command", ["info", "remove", "default", "verify", "bench"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("nothing", "no bundle 'nothing'"), ("../x", "no bundle '../x'"), ("gemma3-local", "quickstart")],
)
def test_a_bundle_that_is_not_there_is_one_line(command: str, name: str, said: str) -> None:
    result = run_llm("gemma-coreml", command, name)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "4096,x"], "not a list of whole numbers"),
        (["--widths", "0,1"], "below 1"),
        (["--bits", "5"], "'5' is not one of"),
        (["--name", "../x"], "../x"),
        ([], "no-such-file"),
    ],
)
def test_convert_refuses_nonsense(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run_llm("gemma-coreml", "convert", str(tmp_path / "no-such-file"), *arguments)
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert not isinstance(result.exception, (KeyError, TypeError))


def test_names_are_completed(user_folder: Path) -> None:
    fake_bundle(user_folder, "gemma-3-one")
    fake_bundle(user_folder, "other")
    from llm_gemma_coreml.command_bundles import info
    from llm_gemma_coreml.command_types import BundleName

    items = BundleName().shell_complete(info.make_context("info", ["x"]), info.params[0], "gem")
    assert [item.value for item in items] == ["gemma-3-one"]


def test_an_unknown_model_is_still_llms_own_error(tmp_path: Path) -> None:
    result = run_llm("-m", "no-such-model", "Hello")
    assert result.exit_code == 1
    assert "no-such-model" in result.output


def test_start_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, llm.cli; bare = set(sys.modules)\n"
        "from llm_gemma_coreml import plugin; plugin.register_commands(llm.cli.cli)\n"
        "plugin.register_models(lambda *a, **k: None)\n"
        "print(*sorted(name for name in set(sys.modules) - bare))"
    )
    child = ChildLlm(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=child.environment(LLM_LOAD_PLUGINS=""),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    assert "llm_gemma_coreml.plugin" in loaded
    assert all(name.startswith("llm_gemma_coreml") for name in loaded), loaded
    rooms = tuple(f"llm_gemma_coreml.{room}" for room in ("engine", "chat", "convert", "runtime"))
    assert not any(name.startswith(rooms) for name in loaded)


def test_the_entry_point_works(tmp_path: Path) -> None:
    done = ChildLlm(tmp_path).run("models", "-q", "gemma3-local")
    assert done.returncode == 0
    assert "coreml/gemma3-270m-base (aliases: gemma3-local)" in done.stdout


def test_every_command_has_a_module() -> None:
    import click

    from llm_gemma_coreml.commands import gemma_coreml

    context = click.Context(gemma_coreml)
    wanted = ("download", "install", "convert", "models", "info", "verify", "bench", "plan", "remove", "default")
    assert tuple(gemma_coreml.list_commands(context)) == wanted
    for name in wanted:
        command = gemma_coreml.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.get_short_help_str()
    listed = run_llm("gemma-coreml", "--help").stdout
    assert all(f"  {name} " in listed for name in wanted)
    assert "No such command 'fly'" in run_llm("gemma-coreml", "fly").stderr


def test_names_of_models_and_devices_are_completed(user_folder: Path) -> None:
    import click

    from llm_gemma_coreml.download.command import download
    from llm_gemma_coreml.planning.command import plan

    fake_bundle(user_folder, "gemma-mine")

    def completed(command: click.Command, parameter: int, beginning: str) -> list[str]:
        found = command.params[parameter]
        return [item.value for item in found.type.shell_complete(click.Context(command), found, beginning)]

    assert completed(download, 0, "gemma-4-12b-it-c") == ["gemma-4-12b-it-coreml-128k"]
    assert "gemma-mine" in completed(plan, 0, "gemma-")
    assert completed(plan, 1, "m4") == ["M4", "M4 Pro", "M4 Max"]
