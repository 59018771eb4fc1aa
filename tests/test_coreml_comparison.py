"""`verify --runtime coreml` over the emulated native module: what it finds, what it advises, what it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support import tiny_models
from support.emulated_coreml import EmulatedCrash, Machine, emulated_coreml

from llm_gemma_coreml.bundle.manifest import load_manifest
from llm_gemma_coreml.bundle.store import FOLDER
from llm_gemma_coreml.commands import gemma_coreml
from llm_gemma_coreml.engine import gate_comparison, gate_first_checks, gate_machine
from llm_gemma_coreml.engine.gate_advice import advice, forms_of
from llm_gemma_coreml.engine.gate_agreement import Agreement, divergence
from llm_gemma_coreml.engine.gate_first_checks import LOADING, RUNGS, SHARING, TEXTS, WIDTHS, WRITES
from llm_gemma_coreml.engine.gate_machine import anonymous
from llm_gemma_coreml.engine.gate_pair import Check
from llm_gemma_coreml.runtime import notices
from llm_gemma_coreml.runtime.base import Array

NAME = "secret-name"
Report = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.gemma3_checkpoint(tmp_path_factory.mktemp("comparison") / "checkpoint", layers=2, window=40)


@pytest.fixture(scope="module")
def bundles(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with one bundle."""
    folder = tmp_path_factory.mktemp("user")
    options = {"contexts": (256, 512), "widths": (1, 4, 128), "layers_per_package": 1}
    tiny_models.gemma3_bundle(folder / FOLDER, checkpoint, NAME, **options)
    return folder


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundles: Path) -> Iterator[Machine]:
    monkeypatch.setenv("LLM_USER_PATH", str(bundles))
    monkeypatch.chdir(tmp_path)
    notices.set_notify(lambda text: None)
    (tmp_path / "machine").mkdir()
    with emulated_coreml(tmp_path / "machine") as emulated:
        yield emulated
        emulated.bound_inputs.clear()
    notices.set_notify(None)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gates, which test_coreml_gates.py runs."""
    monkeypatch.setattr(gate_comparison, "model_gates", lambda manifest: [])


def verify(*arguments: str, code: int = 0) -> Report:
    result = CliRunner().invoke(gemma_coreml, ["verify", NAME, "--runtime", "coreml", *arguments])
    assert result.exit_code == code, result.output
    report: Report = json.loads(Path("coreml-report.json").read_text())
    return report


def by_name(report: Report) -> dict[str, Report]:
    return {check["name"]: check for check in report["checks"]}


def test_all_checks_pass_where_core_ml_computes_what_it_should(machine: Machine) -> None:
    report = verify()
    assert report["passed"]
    assert report["advice"] == []
    checks = by_name(report)
    assert list(checks)[1:7] == [LOADING, WRITES, SHARING, WIDTHS, RUNGS, TEXTS]
    assert len(checks) == 14
    assert checks[WRITES]["figures"]["calls"] > 4
    assert checks[TEXTS]["figures"]["positions"] > 200
    assert checks[TEXTS]["figures"]["smallest_margin"] > 0
    loaded = [step["function"] for step in checks[LOADING]["figures"]["steps"]]
    assert loaded[:4] == ["context_256_width_1", "context_256_width_128", "context_256_width_4", "context_512_width_1"]
    assert "running" not in report


def faulty(fault: str) -> Callable[[str, dict[str, Array]], None]:
    def change(function: str, inputs: dict[str, Array]) -> None:
        if fault == "writes elsewhere":
            for name in inputs.keys() & {"full_write_start", "sliding_write_start"}:
                inputs[name] += 1
        elif fault in function and "context" in function:
            inputs["hidden"] *= np.linspace(1, 3, inputs["hidden"].shape[1], dtype=np.float32)

    return change


@pytest.mark.parametrize(
    ("fault", "failing", "advice"),
    [
        ("writes elsewhere", {WRITES}, "--write-form one_hot or --write-form gather"),
        ("_width_4", {WIDTHS, SHARING, WRITES}, "--write-form one_hot"),
        ("context_512_", {RUNGS, SHARING}, "--attention-form sdpa"),
    ],
)
def test_faults_of_the_machine_are_found(machine: Machine, quick: None, fault: str, failing: set[str], advice: str) -> None:
    machine.before_predict = faulty(fault)
    report = verify(code=1)
    failed = {name for name, check in by_name(report).items() if not check["passed"]}
    assert failing <= failed
    assert TEXTS not in failing or TEXTS in failed
    assert advice in " ".join(report["advice"])


def test_a_state_that_does_not_pass_between_functions_is_found(machine: Machine, quick: None) -> None:
    machine.states_are_shared = False
    report = verify(code=1)
    failed = {name for name, check in by_name(report).items() if not check["passed"]}
    assert SHARING in failed
    assert WIDTHS not in failed
    assert RUNGS not in failed


def test_undefined_values_are_found(machine: Machine, quick: None) -> None:
    def overflow(function: str, outputs: dict[str, Array]) -> None:
        if "logits" in outputs:
            outputs["logits"][:, 5] = np.nan

    machine.after_predict = overflow
    report = verify(code=1)
    assert by_name(report)[TEXTS]["figures"]["not_finite"] > 200
    assert "fp16 overflows" in " ".join(report["advice"])


def test_small_deviations_are_judged_by_the_margin(machine: Machine, quick: None) -> None:
    """A processor with other arithmetic: tokens may differ, where the margin says that it was close."""
    noise = np.random.default_rng(0)

    def deviate(function: str, outputs: dict[str, Array]) -> None:
        if "logits" in outputs:
            outputs["logits"] += noise.uniform(-0.04, 0.04, outputs["logits"].shape).astype(np.float32)

    machine.after_predict = deviate
    report = verify()
    figures = by_name(report)[TEXTS]["figures"]
    assert figures["same_token"] < figures["positions"]
    assert all(each["excused"] and each["margin"] < 0.1 for each in figures["differences"])
    assert 0.01 < figures["largest_logit_difference"] < 0.2
    assert "below 0.1 logits" in report["rule"]


def test_the_report_names_nothing_private(machine: Machine, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_machine.platform, "node", lambda: "annes-macbook.local")
    monkeypatch.setattr(gate_machine.getpass, "getuser", lambda: "anne")
    machine.refuse_functions = {
        "context_512_width_1": f"cannot open file:///Users/anne/models/x.mlmodelc of anne, {machine.folder}/y z"
    }
    verify(code=1)
    text = Path("coreml-report.json").read_text()
    for private in ("anne", "Users", NAME, str(machine.folder), str(Path.cwd()), str(Path.home())):
        assert private not in text, private
    assert "context_512_width_1" in text
    assert "cannot open <path>" in text


def test_paths_and_names_are_taken_out_of_nested_values() -> None:
    value = {"a": ["see /Users/x/y.txt, and K/V", {"b": "file:///tmp/q (host bob)"}], "n": 3, "name": "bob"}
    cleaned = anonymous(value, ["bob", "ab"])
    assert cleaned == {"a": ["see <path>, and K/V", {"b": "<path> (host <private>)"}], "n": 3, "name": "bob"}


def test_after_a_crash_the_same_command_goes_on(machine: Machine, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(pair: Any) -> Any:
        raise EmulatedCrash

    monkeypatch.setitem(gate_first_checks.FIRST_CHECKS, WRITES, crash)
    with pytest.raises(EmulatedCrash):
        CliRunner().invoke(gemma_coreml, ["verify", NAME, "--runtime", "coreml"], catch_exceptions=False)
    left: Report = json.loads(Path("coreml-report.json").read_text())
    assert left["running"] == WRITES
    report = verify(code=1)
    checks = by_name(report)
    assert "crash" in checks[WRITES]["detail"]
    assert checks[TEXTS]["passed"]
    assert "--compute-units all" in " ".join(report["advice"])
    monkeypatch.undo()
    assert list(Path().glob(".report-*")) == []


def test_other_settings_start_a_new_report(machine: Machine, quick: None) -> None:
    Path("coreml-report.json").write_text(json.dumps({"format": 1, "running": WRITES}))
    assert verify()["passed"]
    assert verify("--compute-units", "all")["compute_units"] == "all"


@pytest.mark.parametrize("content", ["", "[1]", "my notes"])
def test_another_file_is_not_overwritten(machine: Machine, content: str) -> None:
    Path("mine.json").write_text(content)
    result = CliRunner().invoke(gemma_coreml, ["verify", NAME, "--runtime", "coreml", "--report", "mine.json"])
    assert result.exit_code == 1
    assert "no report of this command" in result.output
    assert Path("mine.json").read_text() == content


def test_a_package_that_core_ml_refuses_is_reported(machine: Machine, quick: None, bundles: Path) -> None:
    for compiled in [*bundles.rglob("*.mlmodelc")]:
        shutil.rmtree(compiled)
    machine.refuse_package = "Failed to build the model execution plan, error code: -14"
    report = verify(code=1)
    assert "error code: -14" in by_name(report)[LOADING]["detail"]
    assert "It does not load" in report["advice"][0]


def test_refused_compute_units_say_why(machine: Machine) -> None:
    result = CliRunner().invoke(gemma_coreml, ["verify", NAME, "--runtime", "coreml", "--compute-units", "cpuOnly"])
    assert result.exit_code == 1
    assert "SIGSEGV" in result.output


def test_a_bundle_for_the_phone_may_use_the_neural_engine(
    machine: Machine, quick: None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"contexts": (256,), "widths": (1, 4), "bits": None, "target": "iphone"}
    tiny_models.gemma3_bundle(tmp_path / "phone" / FOLDER, checkpoint, NAME, **options)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "phone"))
    report = verify("--compute-units", "cpuAndNeuralEngine")
    assert report["passed"]
    assert "palettes" in report["bundle"]["quantisation"]["body"]
    assert by_name(report)[WRITES]["figures"]["calls"] == 4, "both widths, at two positions"


def test_the_advice_for_the_phone_is_what_its_target_takes() -> None:
    forms = {"write_form": "slice_update", "attention_form": "explicit"}
    for phone in (True, False):
        [line] = advice([Check(LOADING, False, "")], forms, phone)
        assert ("--target iphone" in line) == phone
        assert ("--layers-per-package" in line) != phone


def test_a_changed_file_ends_the_comparison(
    machine: Machine, bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundles, tmp_path / "copy")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "copy"))
    head = next((tmp_path / "copy").rglob("head.mlpackage")) / "Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(head.read_bytes())
    content[len(content) // 2] ^= 1
    head.write_bytes(content)
    report = verify(code=1)
    assert len(report["checks"]) == 1
    assert machine.events == []


def test_off_a_mac_the_command_says_so(bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(bundles))
    result = CliRunner().invoke(gemma_coreml, ["verify", NAME, "--runtime", "coreml"])
    assert result.exit_code == 1
    assert "coreml: Core ML is a part of macOS" in result.output


@pytest.mark.parametrize(("write", "attention"), [("slice_update", "explicit"), ("one_hot", "sdpa"), ("gather", "explicit")])
def test_the_forms_of_a_bundle_are_found_in_its_packages(checkpoint: Path, tmp_path: Path, write: str, attention: str) -> None:
    options = {"contexts": (128,), "widths": (1,), "write_form": write, "attention_form": attention}
    bundle = tiny_models.gemma3_bundle(tmp_path, checkpoint, **options)
    assert forms_of(bundle, load_manifest(bundle)) == {"write_form": write, "attention_form": attention}


def test_agreement_counts_by_its_definitions() -> None:
    agreement = Agreement(0.1)
    one, other = np.array([1.0, 0.95, 0.0], np.float32), np.array([0.95, 1.0, 0.0], np.float32)
    agreement.add("here", 3, one, other)
    assert agreement.passed
    assert agreement.differences[0].token == 0
    assert agreement.differences[0].expected == 1
    assert agreement.differences[0].margin == pytest.approx(0.05)
    assert agreement.largest_difference == pytest.approx(0.05)
    agreement.add("here", 4, np.array([3.0, 0.0, 0.0], np.float32), other)
    assert not agreement.passed
    ids = Agreement(0.1)
    ids.add("ids", 0, np.array(3, np.int32), np.array(4, np.int32))
    assert not ids.passed, "without logits there is no margin that could excuse anything"


def test_divergence_is_that_of_the_definition() -> None:
    random = np.random.default_rng(1)
    p, q = (random.standard_normal(7).astype(np.float32) for _ in range(2))
    shares = [np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (p, q)]
    assert divergence(p, q) == pytest.approx(sum(a * np.log(a / b) for a, b in zip(*shares, strict=True)))
