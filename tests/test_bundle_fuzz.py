"""Thousands of damaged packages: each is read or refused with PackageError, at once and in little memory."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from pathlib import Path

import pytest
from bundle_samples import layer_function, save

from llm_gemma_coreml.bundle import inspection
from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.errors import PackageError

pytest.importorskip("coremltools")
LARGEST_ALLOCATION = 32 << 20
INTERESTING = [
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff" * 4,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\xff" * 9 + b"\x01",
    b"\0" * 7 + b"\x80",
    b"\0\0\0\x80",
]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    functions = {"one": layer_function(1, layers=(0,))}
    return save(functions, tmp_path_factory.mktemp("fuzz") / "fuzz.mlpackage")


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    return shutil.copytree(package, tmp_path / "fuzz.mlpackage")


def mutate(content: bytes, source: random.Random) -> bytes:
    """A few random edits: flipped bits, extreme numbers, cuts, insertions, parts moved elsewhere."""
    data = bytearray(content)
    for _ in range(source.choice((1, 1, 1, 2, 5, 20))):
        position = source.randrange(max(1, len(data)))
        match source.randrange(6):
            case 0:
                data[position : position + 1] = bytes([data[position] ^ (1 << source.randrange(8))])
            case 1:
                value = source.choice(INTERESTING)
                data[position : position + len(value)] = value
            case 2:
                data[position:position] = source.randbytes(source.randrange(1, 9))
            case 3:
                del data[position : position + source.randrange(1, 9)]
            case 4:
                start = source.randrange(len(data))
                piece = data[start : start + source.randrange(1, 200)]
                data[position : position + len(piece)] = piece
            case _ if source.random() < 0.1:
                del data[position:]
        if not data:
            break
    return bytes(data)


def read_everything(path: Path) -> None:
    opened = open_package(path)
    assert opened.default_function in opened.functions
    opened.states()
    for name in opened.functions:
        for constant in opened.functions[name].all_constants():
            if constant.type.dtype not in ("list", "tuple", "dictionary"):
                constant.value()
    inspection.check_shared_weights(opened)


def survive(package: Path, file: Path, part: slice, mutations: int) -> tuple[int, int]:
    """Read the package with many mutations of a part of one file; counts of those read and refused."""
    content = file.read_bytes()
    source = random.Random(20240607)
    read = refused = 0
    tracemalloc.start()
    try:
        for _ in range(mutations):
            changed = content[: part.start] + mutate(content[part], source) + content[part.stop :]
            file.write_bytes(changed)
            try:
                read_everything(package)
                read += 1
            except PackageError:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < LARGEST_ALLOCATION
    finally:
        tracemalloc.stop()
    return read, refused


def test_mutated_specifications(copy: Path) -> None:
    file = copy / "Data/com.apple.CoreML/model.mlmodel"
    read, refused = survive(copy, file, slice(0, file.stat().st_size), 1200)
    assert refused > 300
    assert read > 0


def test_mutated_weight_files(copy: Path) -> None:
    file = copy / "Data/com.apple.CoreML/weights/weight.bin"
    read, refused = survive(copy, file, slice(0, file.stat().st_size), 500)
    assert refused > 25
    assert read > 0


def test_mutated_blob_headers(copy: Path) -> None:
    file = copy / "Data/com.apple.CoreML/weights/weight.bin"
    read, refused = survive(copy, file, slice(0, 128), 500)
    assert refused > 125
    assert read > 0


def test_mutated_manifests(copy: Path) -> None:
    file = copy / "Manifest.json"
    read, refused = survive(copy, file, slice(0, file.stat().st_size), 800)
    assert refused > 200
    assert read > 0
