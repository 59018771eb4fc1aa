"""The package reader against coremltools' own readers, and against damaged packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_samples import HIDDEN, WEIGHTS, layer_functions, save

from llm_gemma_coreml.bundle.package import Package, open_package
from llm_gemma_coreml.bundle.program import Constant, TensorType, check_finite
from llm_gemma_coreml.bundle.weights import WeightFile, unpack
from llm_gemma_coreml.errors import PackageError

ct = pytest.importorskip("coremltools")
PACKED = {
    "int4": (-8, 7),
    "uint1": (0, 1),
    "uint2": (0, 3),
    "uint3": (0, 7),
    "uint4": (0, 15),
    "uint6": (0, 63),
}
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with constants of many kinds, a palette, a state and a nested block."""
    from coremltools.converters.mil import Builder as mb  # noqa: N813
    from coremltools.converters.mil.mil import Function, types

    random = np.random.default_rng(3)
    inputs = {
        "x": mb.placeholder((4, 64), types.fp32),
        "flag": mb.placeholder((1,), types.fp32),
        "memory": mb.state_tensor_placeholder((4, 64), types.fp16),
    }
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        x = function.inputs["x"]
        packed = random.integers(-8, 8, (64, 64)).astype(np.int8)
        int4 = mb.constexpr_blockwise_shift_scale(
            data=packed.astype(types.np_int4_dtype), scale=random.uniform(0.1, 1, (64, 2)).astype(np.float32)
        )
        indices = random.integers(0, 8, (64, 64)).astype(np.uint8).astype(types.np_uint3_dtype)
        palette = random.standard_normal((1, 1, 8, 1)).astype(np.float32)
        looked_up = mb.constexpr_lut_to_dense(indices=indices, lut=palette)
        y = mb.linear(x=mb.linear(x=x, weight=int4), weight=looked_up)
        y = mb.add(x=y, y=random.standard_normal((4, 64)).astype(np.float32))
        rows = mb.gather(x=y, indices=random.integers(0, 4, 50).astype(np.int32), axis=0)
        state = mb.read_state(input=function.inputs["memory"])
        changed = mb.add(x=state, y=random.standard_normal((4, 64)).astype(np.float16))
        written = mb.coreml_update_state(state=function.inputs["memory"], value=changed)
        condition = mb.cast(x=mb.squeeze(x=function.inputs["flag"]), dtype="bool")
        chosen = mb.cond(
            pred=condition,
            _true_fn=lambda: mb.mul(x=y, y=random.standard_normal((4, 64)).astype(np.float32)),
            _false_fn=lambda: mb.exp(x=y),
        )
        total = mb.add(x=chosen, y=mb.cast(x=written, dtype="fp32"))
        function.set_outputs([mb.identity(x=total, name="total"), mb.identity(x=rows, name="rows")])
    return save({"main": function}, tmp_path_factory.mktemp("mixed") / "mixed.mlpackage")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        layer_functions(), tmp_path_factory.mktemp("layers") / "layers.mlpackage", "context_256_width_8"
    )


@pytest.fixture
def copy(mixed: Path, tmp_path: Path) -> Path:
    """A copy of the mixed package to be damaged."""
    return shutil.copytree(mixed, tmp_path / "copy.mlpackage")


def specification(package: Path) -> Any:
    model = ct.proto.Model_pb2.Model()
    model.ParseFromString((package / "Data/com.apple.CoreML/model.mlmodel").read_bytes())
    return model


def weight_path(package: Path) -> Path:
    return package / "Data/com.apple.CoreML/weights/weight.bin"


def edit(package: Path, change: Callable[[Any], None]) -> Path:
    """Change the specification of a package through coremltools' messages."""
    model = specification(package)
    change(model)
    (package / "Data/com.apple.CoreML/model.mlmodel").write_bytes(model.SerializeToString())
    return package


def block_of(model: Any, function: str = "main") -> Any:
    return model.mlProgram.functions[function].block_specializations["CoreML8"]


def read_all(package: Path) -> None:
    """Read everything that there is to read."""
    opened = open_package(package)
    assert opened.default_function in opened.functions
    for name in opened.functions:
        for constant in opened.functions[name].all_constants():
            constant.value()


# --- the same content as coremltools sees -------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33, 1000])
def test_blobs_decode_as_coremltools_decodes_them(tmp_path: Path, count: int) -> None:
    from coremltools.libmilstoragepython import _BlobStorageReader, _BlobStorageWriter

    random = np.random.default_rng(count)
    path = tmp_path / "weight.bin"
    writer = _BlobStorageWriter(str(path))
    blobs: list[tuple[str, int]] = []
    for dtype, (low, high) in PACKED.items():
        values = random.integers(low, high + 1, count).astype(np.int8 if low < 0 else np.uint8)
        blobs.append((dtype, getattr(writer, f"write_{dtype}_data")(values)))
    for dtype in WHOLE:
        values = random.integers(0, 100, count).astype(dtype)
        blobs.append((dtype, getattr(writer, f"write_{dtype.replace('float32', 'float')}_data")(values)))
    half = random.standard_normal(count).astype(np.float16)
    blobs.append(("float16", writer.write_fp16_data(half.view(np.uint16))))
    del writer
    file, reader = WeightFile(path, "weight.bin"), _BlobStorageReader(str(path))
    assert file.blob_count == len(blobs)
    for dtype, offset in blobs:
        found = unpack(file.data(file.reference(offset, dtype, count)), dtype, count)
        short = {"float32": "float", "float16": "fp16"}.get(dtype, dtype)
        expected = np.array(getattr(reader, f"read_{short}_data")(offset))
        expected = expected.view(np.float16) if dtype == "float16" else expected.astype(found.dtype)
        assert found.shape == (count,)
        assert np.array_equal(found, expected), dtype


def _oracle_constants(package: Path) -> dict[str, np.ndarray]:
    """Named constants of `main` as coremltools' frontend reads them."""
    from coremltools.converters.mil.frontend.milproto.load import load

    program = load(
        specification(package), specification_version=9, file_weights_dir=str(weight_path(package).parent)
    )
    found = {}
    for operation in program.functions["main"].operations:
        if operation.op_type == "const":
            found[operation.outputs[0].name] = np.asarray(operation.outputs[0].val)
    return found


def _all_bound(package: Package) -> dict[str, Constant]:
    """Named constants, and constants bound inline as "operation/argument"."""
    function = package.functions["main"]
    found = dict(function.constants)
    for operation in function.operations:
        for argument, values in operation.inputs.items():
            found |= {
                f"{operation.name}/{argument}": value for value in values if isinstance(value, Constant)
            }
    return found


def test_constants_are_those_that_coremltools_reads(mixed: Path) -> None:
    package = open_package(mixed)
    oracle = _oracle_constants(mixed)
    compared = 0
    for name, constant in package.functions["main"].constants.items():
        if name not in oracle:
            continue
        expected = oracle[name]
        assert constant.value().shape == expected.shape, name
        assert np.array_equal(constant.value(), expected.astype(constant.value().dtype)), name
        compared += 1
    assert compared >= 10
    kinds = {constant.type.dtype for constant in _all_bound(package).values()}
    assert {"float32", "float16", "int4", "uint3", "string", "bool", "int32"} <= kinds


def test_operations_are_those_of_the_specification(mixed: Path) -> None:
    function = open_package(mixed).functions["main"]
    expected = [op for op in block_of(specification(mixed)).operations if op.type != "const"]
    assert [op.type for op in function.operations] == [op.type for op in expected]
    for ours, theirs in zip(function.operations, expected, strict=True):
        assert [name for name, _ in ours.outputs] == [output.name for output in theirs.outputs]
        assert ours.inputs.keys() == theirs.inputs.keys()
        for argument, values in ours.inputs.items():
            names = [binding.name for binding in theirs.inputs[argument].arguments]
            assert [value if isinstance(value, str) else "" for value in values] == names
    assert function.inputs == {"x": TensorType("float32", (4, 64)), "flag": TensorType("float32", (1,))}
    assert function.states == {"memory": TensorType("float16", (4, 64))}
    assert function.outputs == ("total", "rows")
    assert function.opset == "CoreML8"


def test_nested_blocks_are_kept(mixed: Path) -> None:
    function = open_package(mixed).functions["main"]
    (choice,) = [op for op in function.operations if op.type == "cond"]
    assert [[op.type for op in block.operations] for block in choice.blocks] == [["mul"], ["exp"]]
    assert all(len(block.outputs) == 1 for block in choice.blocks)


def test_functions_share_one_copy_of_the_weights(layers: Path) -> None:
    package = open_package(layers)
    assert package.default_function == "context_256_width_8"
    assert len(package.functions) == 4
    found: list[Constant] = []
    for name in package.functions:
        function = package.functions[name]
        assert function.states["k_1"] == TensorType("float16", (1, 640, 32))
        constants = [c for c in function.all_constants() if c.type == TensorType("int8", (HIDDEN, HIDDEN))]
        found += constants
    assert len(found) == 4
    assert all(constant.same_bytes(found[0]) for constant in found)
    assert np.shares_memory(found[0].raw(), found[0].raw())
    assert not found[0].raw().flags.writeable
    assert np.array_equal(found[3].value(), WEIGHTS)
    assert package.states() == package.functions["context_512_width_1"].states


def test_packed_bytes_are_not_copied(mixed: Path) -> None:
    constants = _all_bound(open_package(mixed)).values()
    (int4,) = [constant for constant in constants if constant.type.dtype == "int4"]
    assert int4.raw().size == 64 * 64 // 2
    assert int4.raw().base is not None
    low = (int4.raw() & 15).astype(np.int8)
    assert np.array_equal(np.where(low > 7, low - 16, low), int4.value().reshape(-1)[::2])


def test_reading_needs_no_coremltools(mixed: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from llm_gemma_coreml.bundle.package import open_package; "
        f"p = open_package(Path({str(mixed)!r})); p.functions['main'].all_constants()[0].value(); "
        "sys.exit('coremltools was imported' if 'coremltools' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_fingerprint_changes_with_the_package(copy: Path) -> None:
    first, digest = open_package(copy).fingerprint(), open_package(copy).content_digest()
    assert open_package(copy).fingerprint() == first
    data = bytearray(weight_path(copy).read_bytes())
    data[-1] ^= 1
    weight_path(copy).write_bytes(data)
    assert open_package(copy).content_digest() != digest
    os.utime(weight_path(copy), (1, 1))
    assert open_package(copy).fingerprint() != first
    edit(copy, lambda model: setattr(model.mlProgram.functions["main"].inputs[0], "name", "renamed"))
    assert open_package(copy).specification_digest != first


def test_unknown_function(mixed: Path) -> None:
    package = open_package(mixed)
    assert "other" not in package.functions
    with pytest.raises(KeyError):
        package.functions["other"]
    with pytest.raises(PackageError, match="no function 'other'"):
        package.declared_states("other")
    assert list(package.functions) == ["main"]


# --- damaged and hostile packages ----------------------------------------------------------------------


def first_blob(model: Any) -> Any:
    for operation in block_of(model).operations:
        bound = [item.value for argument in operation.inputs.values() for item in argument.arguments]
        for holder in (*operation.attributes.values(), *bound):
            if holder.WhichOneof("value") == "blobFileValue":
                return holder
    raise AssertionError("no blob")


def _file_name(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(first_blob(model).blobFileValue, "fileName", name)


def _offset(offset: int) -> Callable[[Any], None]:
    return lambda model: setattr(first_blob(model).blobFileValue, "offset", offset)


def _double_name(model: Any) -> None:
    operations = [op for op in block_of(model).operations if op.outputs]
    operations[-1].outputs[0].name = operations[0].outputs[0].name


def _undefined_argument(model: Any) -> None:
    operation = next(op for op in block_of(model).operations if "x" in op.inputs)
    operation.inputs["x"].arguments[0].name = "nowhere"


def _huge_shape(model: Any) -> None:
    holder = first_blob(model)
    for dimension in holder.type.tensorType.dimensions:
        dimension.constant.size = 1 << 40


def _other_shape(model: Any) -> None:
    first_blob(model).type.tensorType.dimensions[0].constant.size = 3


def _other_dtype(model: Any) -> None:
    first_blob(model).type.tensorType.dataType = 24


def _other_state(model: Any) -> None:
    wrapped = model.mlProgram.functions["main"].inputs[2].type.stateType.wrappedType
    wrapped.tensorType.dimensions[0].unknown.variadic = True


def _two_opsets(model: Any) -> None:
    function = model.mlProgram.functions["main"]
    function.block_specializations["CoreML7"].CopyFrom(function.block_specializations["CoreML8"])
    function.opset = "CoreML6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_file_name("@model_path/../../../../etc/passwd"), "does not stay inside the package"),
        (_file_name("@model_path//etc/passwd"), "does not stay inside the package"),
        (_file_name("/etc/passwd"), "outside of the package"),
        (_file_name("@model_path/weights/other.bin"), "missing"),
        (_file_name("@model_path/weights"), "not a regular file"),
        (_file_name("@model_path/weights/\0"), "does not stay inside the package"),
        (_offset(0), "no blob can start at byte 0"),
        (_offset(63), "no blob can start at byte 63"),
        (_offset(128), "sentinel"),
        (_offset(1 << 63), "no blob can start"),
        (_offset((1 << 64) - 64), "no blob can start"),
        (_double_name, "twice"),
        (_undefined_argument, "undefined value 'nowhere'"),
        (lambda m: block_of(m).outputs.append("nowhere"), "undefined value 'nowhere'"),
        (_huge_shape, "impossible shape"),
        (_other_shape, "bytes, but|declares"),
        (_other_dtype, "expected int64|declares"),
        (_other_state, "its state 'memory'"),
        (_two_opsets, "no block for its opset 'CoreML6'"),
        (lambda m: setattr(m.description, "defaultFunctionName", "other"), "default function 'other'"),
        (lambda m: m.ClearField("mlProgram"), "no ML Program"),
        (lambda m: m.mlProgram.functions.clear(), "no ML Program"),
    ],
)
def test_damaged_specifications_are_refused(copy: Path, change: Callable[[Any], None], message: str) -> None:
    edit(copy, change)
    with pytest.raises(PackageError, match=message) as caught:
        read_all(copy)
    assert "copy.mlpackage" in str(caught.value)


def blob_header(package: Path) -> int:
    return int(first_blob(specification(package)).blobFileValue.offset)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"\0\0\0\0", "sentinel"),
        (4, b"\x63\0\0\0", "holds type 99"),
        (8, b"\xff" * 8, "claims"),
        (8, b"\x01" + b"\0" * 7, "holds 1 bytes, but"),
        (16, b"\xff" * 8, "claims"),
        (16, b"\0" * 8, "claims"),
    ],
)
def test_damaged_blob_headers_are_refused(copy: Path, position: int, value: bytes, message: str) -> None:
    data = bytearray(weight_path(copy).read_bytes())
    start = blob_header(copy) + position
    data[start : start + len(value)] = value
    weight_path(copy).write_bytes(data)
    with pytest.raises(PackageError, match=message):
        read_all(copy)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000])
def test_truncated_weights_are_refused(copy: Path, size: int) -> None:
    with weight_path(copy).open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(PackageError, match=r"weight\.bin"):
        read_all(copy)


def test_links_out_of_the_package_are_refused(copy: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    weight_path(copy).rename(outside)
    weight_path(copy).symlink_to(outside)
    with pytest.raises(PackageError, match="link that leaves the package"):
        read_all(copy)
    with pytest.raises(PackageError, match="link that leaves the package"):
        open_package(copy).fingerprint()


def test_links_inside_the_package_are_followed(copy: Path) -> None:
    weight_path(copy).rename(weight_path(copy).with_name("real.bin"))
    weight_path(copy).symlink_to("real.bin")
    read_all(copy)


def test_a_pipe_is_not_waited_for(copy: Path) -> None:
    weight_path(copy).unlink()
    os.mkfifo(weight_path(copy))
    with pytest.raises(PackageError, match="not a regular file"):
        read_all(copy)


@pytest.mark.parametrize(
    "path",
    ["../../outside", "/etc/passwd", "", "com.apple.CoreML", "com.apple.CoreML\\model.mlmodel", 7, None],
)
def test_wrong_paths_in_the_manifest_are_refused(copy: Path, path: Any) -> None:
    manifest = json.loads((copy / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = path
    (copy / "Manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PackageError):
        open_package(copy)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 100_000, '{"rootModelIdentifier": {}, "itemInfoEntries": {}}']
)
def test_wrong_manifests_are_refused(copy: Path, text: str) -> None:
    (copy / "Manifest.json").write_text(text)
    with pytest.raises(PackageError, match=r"Manifest\.json"):
        open_package(copy)


def test_missing_packages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="not a folder"):
        open_package(tmp_path / "none.mlpackage")
    with pytest.raises(PackageError, match="missing"):
        open_package(tmp_path)


def test_deeply_nested_messages_are_refused(copy: Path) -> None:
    def nest(model: Any) -> None:
        block = block_of(model)
        for _ in range(20):
            operation = block.operations.add(type="cond")
            block = operation.blocks.add()

    edit(copy, nest)
    with pytest.raises(PackageError, match="nested"):
        read_all(copy)


def test_scales_must_be_finite() -> None:
    check_finite(np.ones(3, np.float16), "the scale")
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(PackageError, match="the scale holds NaN"):
            check_finite(np.array([1, bad], np.float16), "the scale")
