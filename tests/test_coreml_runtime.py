"""The Core ML runtime over the emulated native module: results, and each trap of coremltools' macOS API."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from support.emulated_coreml import EmulatedCrash, Machine, emulated_coreml

from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.errors import BundleError, GemmaCoreMLError, PackageError, RequestError
from llm_gemma_coreml.runtime import notices
from llm_gemma_coreml.runtime.base import Array, RuntimeOptions
from llm_gemma_coreml.runtime.coreml import CoreMLRuntime, availability, loader, native
from llm_gemma_coreml.runtime.coreml.compiled_store import CompiledStore
from llm_gemma_coreml.runtime.coreml.loader import CoreMLPackage
from llm_gemma_coreml.runtime.coreml.states import CoreMLState
from llm_gemma_coreml.runtime.portable import PortableRuntime

LAYERS = "layers_00_02.mlpackage"
NARROW, WIDE, LONG = "context_128_width_1", "context_128_width_4", "context_256_width_1"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coreml")
    checkpoint = tiny_models.gemma3_checkpoint(folder / "checkpoint", layers=2, window=20)
    return tiny_models.gemma3_bundle(folder, checkpoint, contexts=(128, 256), widths=(1, 4))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "machine").mkdir()
    with emulated_coreml(tmp_path / "machine") as emulated:
        yield emulated
        emulated.linger()


@pytest.fixture
def heard() -> Iterator[list[str]]:
    texts: list[str] = []
    notices.set_notify(texts.append)
    yield texts
    notices.set_notify(None)


@pytest.fixture
def package(bundle: Path, machine: Machine, heard: list[str], tmp_path: Path) -> Iterator[CoreMLPackage]:
    opened = open_layers(bundle, tmp_path)
    yield opened
    opened.close()


def open_layers(bundle: Path, folder: Path, units: str | None = None) -> CoreMLPackage:
    return CoreMLRuntime(units).load(bundle / LAYERS, RuntimeOptions(cache_directory=folder / "compiled"))


def feeds(bundle: Path, function: str, position: int, seed: int = 0) -> dict[str, Array]:
    """Inputs of a call at `position`, with all earlier positions present."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for name, kind in open_package(bundle / LAYERS).declared_inputs(function).items():
        inputs[name] = random.standard_normal(kind.shape).astype(np.float32)
        if kind.dtype == "int32":
            inputs[name] = np.arange(kind.shape[0], dtype=np.int32)
    rows = len(inputs["query_positions"])
    inputs["query_positions"] += position
    for kind in ("sliding", "full"):
        if f"{kind}_write_start" in inputs:
            inputs[f"{kind}_write_start"] = np.array([position], np.int32)
            held = inputs[f"{kind}_slot_positions"]
            inputs[f"{kind}_slot_positions"] = np.where(held < position + rows, held, -1).astype(np.int32)
    return inputs


def test_functions_compute_what_the_portable_runtime_computes(bundle: Path, package: CoreMLPackage, tmp_path: Path) -> None:
    portable = PortableRuntime().load(bundle / LAYERS, RuntimeOptions(threads=1, exact=True))
    state, expected_state = package.make_state(), portable.make_state()
    assert state is not None
    assert expected_state is not None
    for function, position in [(WIDE, 0), (NARROW, 4), (LONG, 5)]:
        inputs = feeds(bundle, function, position)
        found = package.function(function).run(inputs, state)
        expected = portable.function(function).run(inputs, expected_state)
        np.testing.assert_array_equal(found["hidden_out"], expected["hidden_out"])
        assert found["hidden_out"].dtype == np.float32
    for name, buffer in expected_state.buffers().items():
        np.testing.assert_array_equal(state.buffers()[name], buffer)
        assert buffer.any()


def test_a_package_is_compiled_once_for_all_functions_and_starts(
    bundle: Path, package: CoreMLPackage, machine: Machine, tmp_path: Path
) -> None:
    for name in (NARROW, WIDE):
        package.function(name)
    package.function(NARROW)
    open_layers(bundle, tmp_path).function(NARROW)
    assert machine.count("compile") == 1
    assert machine.count("load") == 3
    assert only_compiled(tmp_path).is_dir()


def test_two_that_start_at_once_share_one_compilation(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_package, both = native.compile_package, threading.Barrier(2)

    def slowly(package: Path, target: Path) -> None:
        both.wait(timeout=30)  # the other one is on its way
        compile_package(package, target)

    def other() -> None:
        both.wait(timeout=30)
        stores[1].ensure()

    stores = [CompiledStore(open_package(bundle / LAYERS), tmp_path / "compiled") for _ in range(2)]
    monkeypatch.setattr(native, "compile_package", slowly)
    thread = threading.Thread(target=other)
    thread.start()
    stores[0].ensure()
    thread.join()
    assert machine.count("compile") == 1


def test_a_state_that_core_ml_does_not_give_out(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    state = package.make_state()
    assert state is not None
    package.function(NARROW).run(feeds(bundle, NARROW, 0), state)
    machine.refuse_states = "the state cannot be read"
    with pytest.raises(native.CoreMLError, match=r"read_state\(k_0\).*cannot be read"):
        state.take_rows("k_0", slice(0, 1))
    with pytest.raises(native.CoreMLError, match=r"write_state\(k_0\).*cannot be read"):
        state.put_rows("k_0", slice(None), 0)


def test_functions_are_loaded_when_first_needed(package: CoreMLPackage, machine: Machine) -> None:
    assert len(package.function_names) == 4
    assert machine.events == []
    package.function(WIDE)
    assert machine.events[:2] == [f"compile {LAYERS}", f"load {WIDE} CPU_AND_GPU"]
    assert machine.count("load") == 1


def test_one_state_serves_all_functions(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    state = package.make_state()
    package.function(WIDE)
    package.function(LONG)
    warming = machine.count("state")
    for function, position in [(WIDE, 0), (LONG, 4)]:
        package.function(function).run(feeds(bundle, function, position), state)
    assert machine.count("state") == warming + 1


def test_input_arrays_stay_alive_after_the_call(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    state = package.make_state()
    package.function(NARROW).run(feeds(bundle, NARROW, 0), state)
    assert len(machine.bound_inputs) == len(package.function(NARROW)._declared)
    assert {array.dtype for array in machine.bound_inputs} == {np.dtype(np.float32), np.dtype(np.int32)}
    machine.linger()


def test_input_arrays_outlive_the_package(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    package.function(NARROW).run(feeds(bundle, NARROW, 0), package.make_state())
    package.close()
    machine.linger()


def test_the_emulation_crashes_if_nobody_keeps_the_inputs(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    """What the test above would see from code that forgets it."""
    function = package.function(NARROW)
    state = package.make_state()
    assert state is not None
    function.model.predict(feeds(bundle, NARROW, 0), state.for_a_run())
    with pytest.raises(EmulatedCrash, match="GIL"):
        machine.linger()


@pytest.mark.parametrize("change", ["float16", "int64", "read-only", "strided"])
def test_inputs_of_any_kind_reach_core_ml_as_it_takes_them(bundle: Path, package: CoreMLPackage, change: str) -> None:
    inputs = feeds(bundle, NARROW, 0)
    expected = package.function(NARROW).run(inputs, package.make_state())
    if change == "float16":
        inputs["hidden"] = inputs["hidden"].astype(np.float16)
        expected = package.function(NARROW).run(inputs | {"hidden": inputs["hidden"].astype(np.float32)}, package.make_state())
    elif change == "int64":
        inputs["query_positions"] = inputs["query_positions"].astype(np.int64)
    elif change == "read-only":
        inputs["hidden"].flags.writeable = False
    else:
        inputs["hidden"] = np.repeat(inputs["hidden"], 2, axis=1)[:, ::2]
    found = package.function(NARROW).run(inputs, package.make_state())
    np.testing.assert_array_equal(found["hidden_out"], expected["hidden_out"])


def test_the_callers_inputs_are_not_changed(bundle: Path, package: CoreMLPackage) -> None:
    inputs = feeds(bundle, NARROW, 0)
    inputs["hidden"] = inputs["hidden"].astype(np.float16)
    package.function(NARROW).run(inputs, package.make_state())
    assert inputs["hidden"].dtype == np.float16


def test_outputs_are_not_overwritten_by_the_next_call(bundle: Path, package: CoreMLPackage) -> None:
    state = package.make_state()
    first = package.function(NARROW).run(feeds(bundle, NARROW, 0), state)["hidden_out"]
    kept = first.copy()
    package.function(NARROW).run(feeds(bundle, NARROW, 1, seed=1), state)
    np.testing.assert_array_equal(first, kept)


def test_calls_on_one_state_take_turns(bundle: Path, package: CoreMLPackage) -> None:
    state = package.make_state()
    failures: list[BaseException] = []

    def call(position: int) -> None:
        try:
            for _ in range(5):
                package.function(NARROW).run(feeds(bundle, NARROW, position), state)
                assert state is not None
                state.take_rows("k_0", slice(0, 2))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(position,)) for position in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_state_rows_are_read_and_written(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    state = package.make_state()
    assert state is not None
    assert not state.take_rows("k_0", slice(0, 3)).any()
    assert machine.events == [], "an untouched state needs nothing of Core ML"
    rows = np.random.default_rng(0).standard_normal((1, 2, 32)).astype(np.float16)
    state.put_rows("k_0", np.array([5, 130]), rows)
    np.testing.assert_array_equal(state.take_rows("k_0", np.array([5, 130])), rows)
    state.put_rows("k_0", slice(5, 6), 0)
    assert not state.take_rows("k_0", slice(0, 130)).any()
    np.testing.assert_array_equal(state.take_rows("k_0", slice(130, 131)), rows[:, 1:])
    assert state.nbytes() == sum(buffer.size * 2 for buffer in state.buffers().values())
    everything = np.random.default_rng(1).standard_normal(state.shapes()["v_0"]).astype(np.float16)
    state.put_rows("v_0", slice(None), everything)
    np.testing.assert_array_equal(state.buffers()["v_0"], everything)
    with pytest.raises(ValueError):
        state.buffers()["k_0"][:] = 1
    inputs = feeds(bundle, NARROW, 3)
    package.function(NARROW).run(inputs, state)
    assert state.take_rows("k_0", slice(3, 4)).any()


@pytest.mark.parametrize(
    ("units", "reason"), [("cpuOnly", "SIGSEGV"), ("cpuAndNeuralEngine", "4 states"), ("gpu", "no compute units")]
)
def test_compute_units_known_to_crash_are_refused(bundle: Path, tmp_path: Path, units: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        open_layers(bundle, tmp_path, units)
    assert "cpuAndGPU" in str(caught.value)


def test_compute_units_may_be_chosen(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_layers(bundle, tmp_path, "all").function(NARROW)
    monkeypatch.setenv("LLM_GEMMA_COREML_COMPUTE_UNITS", "cpuOnly")
    head = CoreMLRuntime().load(bundle / "head.mlpackage", RuntimeOptions(cache_directory=tmp_path / "compiled"))
    head.function("width_1").run({"hidden": np.zeros((1, 64), np.float32)})
    assert [event for event in machine.events if "load" in event] == [f"load {NARROW} ALL", "load width_1 CPU_ONLY"]


def test_users_are_told_before_slow_work_starts(package: CoreMLPackage, machine: Machine) -> None:
    """Core ML holds the GIL, so that nothing can be said while it works."""
    seen: list[int] = []
    notices.set_notify(lambda text: seen.append(len(machine.events)))
    package.function(NARROW)
    assert seen == [0, 1]


def test_users_are_not_told_again_of_what_was_quick(bundle: Path, machine: Machine, heard: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        open_layers(bundle, tmp_path).function(NARROW)
    assert len(heard) == 2
    [uses] = (tmp_path / "compiled").glob("*.uses.json")
    uses.write_text(uses.read_text().replace(":", ": 9"))
    open_layers(bundle, tmp_path).function(NARROW)
    assert len(heard) == 3, "it took long the last time"
    uses.write_text("damaged")
    open_layers(bundle, tmp_path).function(NARROW)
    assert len(heard) == 4


def test_a_function_is_warmed_up_on_a_state_of_its_own(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    state = package.make_state()
    package.function(NARROW)
    assert machine.events[-2:] == [f"state {NARROW}", f"predict {NARROW}"]
    assert state is not None
    assert not state.buffers()["k_0"].any()


def test_no_large_state_is_reserved_for_warming_up(
    bundle: Path, package: CoreMLPackage, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_SMALL_STATE", 1000)
    package.function(NARROW)
    assert machine.count("state") == machine.count("predict") == 0


# Compiled forms that are missing, damaged or out of date


def only_compiled(folder: Path) -> Path:
    [found] = (folder / "compiled").glob("*.mlmodelc")
    return found


@pytest.mark.parametrize("damage", ["deleted", "a file deleted", "a file cut short", "inventory deleted", "inventory damaged"])
def test_a_damaged_compiled_form_is_made_again(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, damage: str
) -> None:
    open_layers(bundle, tmp_path).function(NARROW)
    compiled = only_compiled(tmp_path)
    if damage == "deleted":
        shutil.rmtree(compiled)
    elif damage == "a file deleted":
        (compiled / "coremldata.bin").unlink()
    elif damage == "a file cut short":
        (compiled / "coremldata.bin").write_bytes(b"")
    elif damage == "inventory deleted":
        compiled.with_suffix(".json").unlink()
    else:
        compiled.with_suffix(".json").write_text("{")
    machine.packages.clear()
    package = open_layers(bundle, tmp_path)
    package.function(NARROW).run(feeds(bundle, NARROW, 0), package.make_state())
    assert machine.count("compile") == 2
    assert only_compiled(tmp_path) == compiled


def test_a_compiled_form_deleted_while_it_is_in_use_is_made_again(
    package: CoreMLPackage, machine: Machine, tmp_path: Path
) -> None:
    package.function(NARROW)
    shutil.rmtree(only_compiled(tmp_path))
    package.function(WIDE)
    assert machine.count("compile") == 2


def test_a_form_that_core_ml_no_longer_takes_is_made_again_once(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path
) -> None:
    open_layers(bundle, tmp_path).function(NARROW)
    machine.refuse_functions = {WIDE: "the compiled model was made by another version"}
    with pytest.raises(native.CoreMLError, match="another version"):
        open_layers(bundle, tmp_path).function(WIDE)
    assert machine.count("compile") == 2


def test_a_stale_compiled_form_is_replaced(bundle: Path, machine: Machine, heard: list[str], tmp_path: Path) -> None:
    other = tmp_path / "bundle"
    shutil.copytree(bundle / LAYERS, other / LAYERS)
    shutil.copytree(bundle / LAYERS, other / "layers_00_02-b.mlpackage")
    options = RuntimeOptions(cache_directory=tmp_path / "compiled")
    neighbour = CoreMLRuntime().load(other / "layers_00_02-b.mlpackage", options)
    neighbour.function(NARROW)
    open_layers(other, tmp_path).function(NARROW)
    before = set((tmp_path / "compiled").glob("*.mlmodelc"))
    weights = other / LAYERS / "Data/com.apple.CoreML/weights/weight.bin"
    weights.write_bytes(weights.read_bytes())
    open_layers(other, tmp_path).function(NARROW)
    after = set((tmp_path / "compiled").glob("*.mlmodelc"))
    assert len(after) == 2, "the old form is gone, the other package's stays"
    assert len(before & after) == 1
    assert len(list((tmp_path / "compiled").glob("*.json"))) == 4


def test_another_macos_needs_another_compiled_form(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llm_gemma_coreml.runtime.coreml import compiled_store

    for version in ((15, 6), (26, 0)):
        monkeypatch.setattr(compiled_store, "macos_version", lambda version=version: version)
        open_layers(bundle, tmp_path).function(NARROW)
    assert machine.count("compile") == 2
    assert only_compiled(tmp_path)


def test_an_interrupted_compilation_leaves_nothing_that_looks_whole(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(package: Path, target: Path) -> None:
        target.mkdir()
        (target / "coremldata.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native, "compile_package", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_layers(bundle, tmp_path).function(NARROW)
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == [".layers_00_02.compiling"]
    open_layers(bundle, tmp_path).function(NARROW)


def test_without_a_cache_folder_nothing_is_left_behind(bundle: Path, machine: Machine, heard: list[str]) -> None:
    package = CoreMLRuntime().load(bundle / LAYERS, RuntimeOptions())
    package.function(NARROW)
    kept = package._store.path
    assert kept.is_dir()
    package.close()
    assert not kept.parent.exists()


# Errors


def test_a_package_that_core_ml_refuses(bundle: Path, machine: Machine, heard: list[str], tmp_path: Path) -> None:
    machine.refuse_package = "Failed to parse the model specification. Error: Unable to parse ML Program: unknown op"
    with pytest.raises(PackageError, match="unknown op") as caught:
        open_layers(bundle, tmp_path).function(NARROW)
    assert LAYERS in str(caught.value)
    assert "--write-form" in str(caught.value)


def test_a_function_that_core_ml_refuses(package: CoreMLPackage, machine: Machine) -> None:
    machine.refuse_functions = {WIDE: "Error computing NN outputs -14."}
    with pytest.raises(native.CoreMLError, match=rf"{WIDE}.*CPU_AND_GPU.*-14"):
        package.function(WIDE)
    package.function(NARROW)


def test_a_prediction_that_fails(bundle: Path, package: CoreMLPackage, machine: Machine) -> None:
    def fail(function: str, inputs: dict[str, Array]) -> None:
        raise RuntimeError("Unable to compute the prediction (error code: -1)")

    function = package.function(NARROW)
    machine.before_predict = fail
    with pytest.raises(native.CoreMLError, match="error code: -1"):
        package.function(WIDE)
    with pytest.raises(native.CoreMLError, match="error code: -1"):
        function.run(feeds(bundle, NARROW, 0), package.make_state())


def test_a_missing_input_a_wrong_shape_and_a_missing_state(bundle: Path, package: CoreMLPackage) -> None:
    inputs = feeds(bundle, NARROW, 0)
    function = package.function(NARROW)
    with pytest.raises(GemmaCoreMLError, match="needs the input 'hidden'"):
        function.run({key: value for key, value in inputs.items() if key != "hidden"}, package.make_state())
    with pytest.raises(GemmaCoreMLError, match="shape"):
        function.run(inputs | {"hidden": np.zeros((2, 64), np.float32)}, package.make_state())
    with pytest.raises(GemmaCoreMLError, match="needs a state"):
        function.run(inputs)
    with pytest.raises(GemmaCoreMLError, match="another runtime"):
        function.run(inputs, PortableRuntime().load(bundle / LAYERS, RuntimeOptions()).make_state())
    with pytest.raises(PackageError, match="no function 'context_9'"):
        package.function("context_9")


def test_a_folder_that_cannot_be_written_to(
    bundle: Path, machine: Machine, heard: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(package: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native, "compile_package", full)
    with pytest.raises(BundleError, match=r"No space left on device.*Make room"):
        open_layers(bundle, tmp_path).function(NARROW)


# Where Core ML is not


def test_off_a_mac_the_reason_is_given() -> None:
    assert CoreMLRuntime().available() == "Core ML is a part of macOS"


def test_reasons_on_a_mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(availability.sys, "platform", "darwin")
    monkeypatch.setattr(availability.platform, "mac_ver", lambda: ("14.5", ("", "", ""), "arm64"))
    assert "this is macOS 14.5" in str(availability.unavailable_reason())
    monkeypatch.setattr(availability.platform, "mac_ver", lambda: ("15.6.1", ("", "", ""), "arm64"))
    assert "lacks its native library" in str(availability.unavailable_reason())
    monkeypatch.setattr(availability, "_coremltools_folder", lambda: None)
    assert "not installed" in str(availability.unavailable_reason())
    monkeypatch.setattr(availability, "_coremltools_folder", lambda: tmp_path)
    (tmp_path / f"libcoremlpython{availability.EXTENSION_SUFFIXES[-1]}").write_bytes(b"")
    assert availability.unavailable_reason() is None


def test_states_come_from_one_lock(package: CoreMLPackage) -> None:
    one, other = package.make_state(), package.make_state()
    assert isinstance(one, CoreMLState)
    assert isinstance(other, CoreMLState)
    assert one._lock is other._lock is package._lock
