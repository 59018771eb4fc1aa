"""What `plan` computes: bytes and times against sums by hand, published runs, and the files of a real bundle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin_environment import run_llm

from llm_gemma_coreml.convert.build import BuildOptions
from llm_gemma_coreml.errors import RequestError
from llm_gemma_coreml.known_models import KNOWN_MODELS
from llm_gemma_coreml.planning import facts, report, step
from llm_gemma_coreml.planning.bandwidth import measure_bandwidth
from llm_gemma_coreml.planning.devices import DEVICES, Device, device_names, find_device
from llm_gemma_coreml.planning.figures import MARKS, published
from llm_gemma_coreml.planning.published_runs import TOLERANCE, comparisons
from llm_gemma_coreml.planning.shapes import PUBLISHED, CacheKind, ModelShape, shape_of_bundle, shape_of_config
from llm_gemma_coreml.planning.sources import find_shape, plannable
from llm_gemma_coreml.planning.speculation import break_even, speedup, tokens_per_round

FREE = published(0.0, "ms", "made up")
PLAIN = Device("made up", "mac", published(100, "GB/s", "made up"), (16, 32), published(1, "x", "made up"), FREE)
SMALL = ModelShape(
    name="small",
    origin="made up",
    weights_basis="computed",
    body_bytes=3_000_000,
    head_bytes=1_000_000,
    packages=2,
    sliding=CacheKind(layers=5, kv_heads=2, head_dim=32, query_heads=4),
    full=CacheKind(layers=1, kv_heads=1, head_dim=64, query_heads=4),
    ring=1152,
    rungs=(4096, 32768),
)


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    return tmp_path


def test_cache_is_that_of_the_states() -> None:
    ring = 5 * 2 * 1152 * 32 * 2 * 2  # layers, K and V heads, slots, head dim, K and V, fp16
    full = 1 * 4096 * 64 * 2 * 2
    assert SMALL.cache_bytes(4096) == ring * 1 + full
    assert step.bytes_once(SMALL, 4096).total == 4_000_000 + SMALL.cache_bytes(4096)


def test_the_floor_reads_everything_once_at_full_speed() -> None:
    assert step.floor_milliseconds(SMALL, PLAIN, 4096) == pytest.approx(step.bytes_once(SMALL, 4096).total / 100e9 * 1e3)


def test_a_call_of_our_layout_is_the_floor_over_the_efficiency_and_the_starts() -> None:
    started = replace(PLAIN, dispatch=published(2.0, "ms", "made up"))
    expected = step.floor_milliseconds(SMALL, PLAIN, 4096) / PLAIN.efficiency.value + 2 * 2.0
    assert step.call_milliseconds(SMALL, started, 4096) == pytest.approx(expected)


def test_more_rows_cost_on_the_weights_only() -> None:
    slow = replace(PLAIN, verify_ratio=published(2.5, "x", "made up"))
    plain = step.call_milliseconds(SMALL, slow, 4096)
    weights = 4_000_000 / (100e6 * slow.efficiency.value)
    assert step.call_milliseconds(SMALL, slow, 4096, 4) == pytest.approx(plain + 1.5 * weights)
    assert step.call_milliseconds(SMALL, slow, 4096, 3) == pytest.approx(plain + 1.0 * weights)


def test_the_published_layout_pays_for_repeats_and_one_hot_writes() -> None:
    assert step.passes(SMALL, SMALL.full) == 1
    slow = replace(SMALL, layout="published")
    assert step.passes(slow, slow.full) == 8 + 1 + 2 * 4
    assert step.bytes_moved(slow, 4096).full == step.bytes_once(slow, 4096).full * 17
    assert step.floor_milliseconds(slow, PLAIN, 4096) == step.floor_milliseconds(SMALL, PLAIN, 4096)


def test_a_model_that_does_not_fit_a_phone_is_loaded_for_each_call() -> None:
    phone = find_device("iPhone 14")
    large = replace(SMALL, body_bytes=5_000_000_000)
    assert not step.is_load_bound(SMALL, phone, 4096)
    assert step.is_load_bound(large, phone, 4096)
    assert step.call_milliseconds(large, phone, 4096) > large.weight_bytes / 1.45e6
    assert "loading weights" in facts.time_by_part(large, phone, 4096)
    assert facts.fits(large, phone).startswith("no")
    assert facts.fits(SMALL, phone) == "yes"
    assert facts.fits(large, find_device("M1")) == "yes, with 8 GB or more"


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("device", ["M4 Max", "iPhone 14"])
def test_times_by_part_add_up(device: str, rows: int) -> None:
    found = find_device(device)
    parts = sum(figure.value for figure in facts.time_by_part(PUBLISHED, found, 32768).values())
    assert parts == pytest.approx(step.call_milliseconds(PUBLISHED, found, 32768))


def test_tokens_of_a_round() -> None:
    assert tokens_per_round(0, 3) == 1
    assert tokens_per_round(1, 3) == 4
    generator = np.random.default_rng(1)
    kept = np.cumprod(generator.random((200_000, 3)) < 0.6, axis=1).sum(axis=1) + 1
    assert tokens_per_round(0.6, 3) == pytest.approx(kept.mean(), rel=0.01)


def test_break_even_is_where_speculation_pays() -> None:
    chance = break_even(3, plain=10, verify=14, drafting=3)
    assert chance is not None
    assert speedup(tokens_per_round(chance, 3), 10, 14, 3) == pytest.approx(1)
    assert break_even(3, plain=10, verify=50, drafting=0) is None


def test_what_others_measured_is_reproduced() -> None:
    pairs = {pair.what: pair for pair in comparisons()}
    needed = [
        "decoding at 32K",
        "decoding at 128K",
        "speculation, counting: 2.56 tokens a round",
        "speculation, all of 8 tokens in the fewest calls",
        "speculation, 2.33 tokens a round",
    ]
    assert [pairs[what].theirs for what in needed] == [90.51, 300.96, 1.47, 2.40, 2.08]
    assert {what: pairs[what].error for what in needed if abs(pairs[what].error) > TOLERANCE} == {}
    for pair in pairs.values():
        assert pair.reproduced or "not reproduced" in pair.remark, pair


@pytest.mark.parametrize("name", ["m4-max", "M4 MAX", "m4max"])
def test_devices_in_any_spelling(name: str) -> None:
    assert find_device(name).bandwidth.value == 546


@pytest.mark.parametrize(
    ("name", "chip"), [("iphone 17 pro", "A19 Pro"), ("A19 Pro", "A19 Pro"), ("iPhone 17", "A19"), ("a15", "A15")]
)
def test_phones_by_model_or_chip(name: str, chip: str) -> None:
    assert find_device(name).name.endswith(f"({chip})")


@pytest.mark.parametrize("name", ["M9", "", "iphone", "()", "M4 Ultra"])
def test_an_unknown_device_is_one_line_with_the_list(name: str) -> None:
    with pytest.raises(RequestError, match=r"M5 Max.*iPhone 14.*this machine"):
        find_device(name)


def test_every_figure_of_a_device_has_a_source() -> None:
    names = [device.name for device in DEVICES]
    assert len(set(names)) == len(names)
    for chip in ("M1", "M2", "M3", "M4", "M5"):
        assert {chip, f"{chip} Max"} <= set(names)
    for device in DEVICES:
        for figure in (device.bandwidth, device.verify_ratio, device.dispatch, device.efficiency):
            assert figure.source, device
            assert figure.basis in MARKS


def test_the_bandwidth_of_this_machine_is_measured() -> None:
    figure = measure_bandwidth(threads=1, size=8 << 20)
    assert (figure.basis, figure.unit) == ("measured", "GB/s")
    assert 0.1 < figure.value < 10_000


FORM = ("packages", "sliding", "full", "ring", "rungs", "widths", "states", "palettised")


def test_a_configuration_gives_what_convert_writes(tmp_path: Path) -> None:
    from tiny_checkpoints import gemma3_tensors, tiny_gemma3_config, write_checkpoint

    from llm_gemma_coreml.convert.build import build_bundle
    from llm_gemma_coreml.convert.source import open_source

    source = write_checkpoint(tmp_path / "tiny", tiny_gemma3_config(), gemma3_tensors())
    bundle = build_bundle(source, name="tiny", bits=8, contexts=(256,), folder=tmp_path / "bundles")
    built = shape_of_bundle(bundle)
    opened = open_source(source)
    planned = shape_of_config(opened.config, "tiny", BuildOptions(bits=8, contexts=(256,)))
    opened.close()
    for part in FORM:
        assert getattr(planned, part) == getattr(built, part), part
    # Norms and tables, which are small, weigh in this tiny model.
    assert planned.head_bytes == pytest.approx(built.head_bytes, rel=0.1)
    assert planned.body_bytes == pytest.approx(built.body_bytes, rel=0.15)


@pytest.fixture(scope="module")
def for_the_phone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint, a user's folder with the bundle "phone" of it)."""
    from support.tiny_models import gemma3_bundle, gemma3_checkpoint

    folder = tmp_path_factory.mktemp("phone")
    checkpoint = gemma3_checkpoint(folder / "checkpoint", layers=6, window=40)
    options: dict[str, Any] = {"contexts": (256, 512), "widths": (1, 4), "bits": None, "target": "iphone"}
    gemma3_bundle(folder / "gemma-coreml", checkpoint, name="phone", **options)
    return checkpoint, folder


def test_a_configuration_for_the_phone_gives_what_convert_writes(for_the_phone: tuple[Path, Path]) -> None:
    from llm_gemma_coreml.convert.source import open_source

    checkpoint, folder = for_the_phone
    opened = open_source(checkpoint)
    planned = shape_of_config(opened.config, "phone", BuildOptions(contexts=(256, 512), target="iphone"))
    opened.close()
    built = shape_of_bundle(folder / "gemma-coreml" / "phone")
    for part in FORM:
        assert getattr(planned, part) == getattr(built, part), part
    # Zeros for biases and the blobs' headers come on top of the files.
    assert 0 <= built.body_bytes - planned.body_bytes < 6 * 8192


def test_the_plan_of_an_installed_bundle_for_the_phone(
    for_the_phone: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = for_the_phone[1]
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    figures = json.loads(run("phone", "--device", "iPhone 17 Pro", "--json").stdout)
    sizes = {path.parents[3].name: path.stat().st_size for path in folder.rglob("weight.bin")}
    weights, packages = figures["model"]["weights"], figures["model"]["packages"]
    assert (weights["value"], weights["basis"]) == (sum(sizes.values()), "measured")
    assert (packages["count"], packages["states"], packages["widths"]) == (7, 2, [1, 4])
    assert packages["largest"]["value"] == max(sizes.values())
    assert [rung["rung"] for rung in figures["rungs"]] == [256, 512]
    assert [rung["reads"]["body"]["value"] for rung in figures["rungs"]] == [sum(sizes.values()) - sizes["head.mlpackage"]] * 2
    assert list(figures["rungs"][0]["verify"]) == ["4"], "it has no function of 8 rows"
    assert {case["rows"] for case in figures["speculation"]} == {4}
    text = run("phone", "--device", "iPhone 17 Pro").stdout
    assert "up to 2 states in one; 1, 4 rows a call" in text
    assert "A prompt is read 4 tokens a call" in text
    assert "--target iphone" not in text
    monkeypatch.setattr("llm_gemma_coreml.planning.bandwidth.BYTES", 1 << 20)
    here = json.loads(run("phone", "--json").stdout)
    assert here["rungs"][0]["reads"]["body"]["value"] == 8 * figures["rungs"][0]["reads"]["body"]["value"]
    assert f"{sum(sizes.values()) / 1e6:,.0f} MB are stored" in " ".join(here["remarks"])


def test_a_bundle_to_be_for_the_phone() -> None:
    usual, phone = (
        json.loads(run("gemma-3-1b", "--device", "iPhone 17 Pro", "--bits", "4", "--json", *more).stdout)
        for more in ((), ("--target", "iphone"))
    )
    assert "see --target iphone" in " ".join(usual["remarks"])
    assert "see --target iphone" not in " ".join(phone["remarks"])
    assert phone["model"]["packages"]["count"] == 27
    assert phone["model"]["packages"]["states"] == 2
    assert [rung["rung"] for rung in phone["rungs"]] == [1024, 4096]
    # 16 fp16 values for 16 rows of mostly 1,152 columns, instead of an fp16 scale for each 32 values.
    share = phone["rungs"][0]["reads"]["body"]["value"] / usual["rungs"][0]["reads"]["body"]["value"]
    assert share == pytest.approx((0.5 + 2 / 1152) / 0.5625, rel=0.002)


@pytest.mark.parametrize(
    ("widths", "planned"), [((1, 2, 4, 8, 128), (4, 8)), ((1, 128), ()), ((1, 2, 128), (2,)), ((1, 4), (4,))]
)
def test_verify_calls_are_those_that_there_are_functions_for(widths: tuple[int, ...], planned: tuple[int, ...]) -> None:
    shape = replace(SMALL, widths=widths)
    assert facts.verify_rows(shape) == planned
    text = report.render(facts.plan(shape, PLAIN))
    assert ("Speculation: none" in text) == (not planned)


def test_the_catalogues_memory_figures_are_those_of_the_plan() -> None:
    for model in KNOWN_MODELS:
        if model.memory.endswith("(computed)"):
            shape = find_shape(model.name)
            said = float(model.memory.split()[0])
            assert said == pytest.approx(shape.memory_bytes(32768) / 1e9, abs=0.06), model.name


def run(*arguments: str) -> Any:
    result = run_llm("gemma-coreml", "plan", *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_table_marks_every_figure() -> None:
    result = run("gemma-4-12b-it", "--device", "M4 Max")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    rows = [line for line in lines if line.strip().startswith(("4,096", "32,768", "131,072"))]
    assert len(rows) == 3
    for row in rows:
        cells = [cell.strip() for cell in row.strip().split("  ") if cell.strip()]
        assert len(cells) == 12
        assert all(cell[-2:] in (" c", " p", " m") for cell in cells[1:]), row
    assert "546 GB/s p of memory bandwidth" in result.stdout
    assert "Apple, technical specifications" in result.stdout


def test_json_has_a_basis_for_every_figure() -> None:
    figures = json.loads(run("gemma-4-12b-it", "--device", "iPhone 17 Pro", "--json", "--compare").stdout)

    def check(value: Any) -> int:
        if isinstance(value, dict) and "value" in value:
            assert value["basis"] in MARKS
            assert value["unit"]
            return 1
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return sum(check(child) for child in children)

    assert check(figures) > 40
    assert {pair["what"] for pair in figures["compared"]} == {pair.what for pair in comparisons()}


def test_the_published_bundle_is_explained() -> None:
    text = run("gemma-4-12b-it-coreml-128k", "--device", "m4 max", "--compare").stdout
    assert "Why 88 ms and not 14 at 32,768 tokens" in text
    assert "What our ladder does instead" in text
    assert "not reproduced" in text


def test_contexts_and_bits_of_a_bundle_to_be() -> None:
    four = json.loads(run("gemma-3-1b", "--device", "M2", "--contexts", "2048,8192", "--bits", "4", "--json").stdout)
    eight = json.loads(run("gemma-3-1b", "--device", "M2", "--contexts", "2048,8192", "--bits", "8", "--json").stdout)
    assert [rung["rung"] for rung in four["rungs"]] == [2048, 8192]
    assert four["model"]["weights"]["value"] < eight["model"]["weights"]["value"]


def test_the_plan_of_an_installed_bundle(user_folder: Path) -> None:
    from support.tiny_models import gemma3_bundle, gemma3_checkpoint

    gemma3_bundle(user_folder / "gemma-coreml", gemma3_checkpoint(user_folder / "checkpoint"), name="tiny", contexts=(256,))
    figures = json.loads(run("coreml/tiny", "--device", "M1", "--json").stdout)
    assert figures["model"]["weights"]["basis"] == "measured"
    assert [rung["rung"] for rung in figures["rungs"]] == [256]
    assert "tiny" in plannable()


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    assert run("gemma-3-270m", "--device", "M5", "--plot", str(path)).exit_code == 0
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gemma-4-12b-it", "--device", "M9"], "There is no device 'M9'. Known: M1,"),
        (["gemma-9", "--device", "M1"], "no known model 'gemma-9'. Known: gemma-3-12b,"),
        (["gemma-3-1b", "--device", "M1", "--plot", "x.txt"], "must end in .png"),
        (["gemma-3-1b", "--device", "M1", "--contexts", "0"], "below 1"),
        (["gemma-3-1b", "--device", "A19", "--target", "iphone", "--bits", "8"], "leave out --bits"),
        (["gemma-3-1b", "--device", "M1", "--plot", "/no/such/folder/x.png"], "No such file"),
    ],
)
def test_nonsense_is_one_line(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert result.stdout == ""


def test_this_machine_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_gemma_coreml.planning.bandwidth.BYTES", 1 << 20)
    assert "this machine" in device_names()
    text = run("gemma-3-270m").stdout
    assert "GB/s m of memory bandwidth" in text
