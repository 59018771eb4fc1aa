"""Packages that coremltools converts from torch modules, run by the portable runtime and compared with
torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from portable_programs import convert_torch, ct, mb, quiet, run_package, save_program, translate_package
from torch import Tensor, nn

from llm_gemma_coreml.bundle.package import open_package
from llm_gemma_coreml.bundle.program import Constant, Function, Operation, TensorType
from llm_gemma_coreml.errors import PackageError, UnsupportedOperationError
from llm_gemma_coreml.runtime.portable.context import Claim, Context
from llm_gemma_coreml.runtime.portable.translate import run_translation, translate_function


class _Function(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: Tensor) -> Any:
        return self.function(*self.parts, *values)


def _image_network(first: Any, second: Any, last: Any, x: Tensor) -> Tensor:
    hidden = F.max_pool2d(F.relu(first(x)), 2)
    return last(F.adaptive_avg_pool2d(F.silu(second(hidden)), 1).flatten(1))


def _shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    turned = x.view(6, 8).t().reshape(8, 2, 3)
    left, right = turned.chunk(2, dim=0)
    return torch.cat([right, -left], 0).permute(1, 2, 0), x[:, 1:, ::2].repeat(1, 2, 1).unsqueeze(0)


def _picks(table: Any, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = table(ids)
    values, places = torch.topk(x, 3, dim=-1)
    return rows, values + torch.gather(x, 1, places), torch.where(x > 0, x, x.exp())


def _transformer_layer(first: Any, project: Any, join: Any, second: Any, up: Any, down: Any, x: Tensor) -> Tensor:
    heads = [part.view(2, 6, 4, 8).transpose(1, 2) for part in project(first(x)).chunk(3, -1)]
    attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(2, 6, 32)
    x = x + join(attended)
    return x + down(F.gelu(up(second(x)), approximate="tanh"))


def _masked(x: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(5, 5)) == 0
    return (x @ x.transpose(-1, -2)).masked_fill(mask, -1e4).softmax(-1) @ x


torch.manual_seed(0)
MODULES: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "mlp": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), (torch.randn(5, 32),)),
    "image": (
        _Function(_image_network, nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4), nn.Linear(8, 4)),
        (torch.randn(2, 3, 12, 12),),
    ),
    "batch_norm": (nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.LeakyReLU()), (torch.randn(2, 4, 9),)),
    "transformer_layer": (
        _Function(
            _transformer_layer,
            nn.LayerNorm(32),
            nn.Linear(32, 96),
            nn.Linear(32, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 48),
            nn.Linear(48, 32),
        ),
        (torch.randn(2, 6, 32),),
    ),
    "shapes": (_Function(_shapes), (torch.randn(2, 3, 8),)),
    "picks": (_Function(_picks, nn.Embedding(20, 8)), (torch.randint(0, 20, (2, 3)), torch.randn(4, 9))),
    "masked": (_Function(_masked), (torch.randn(2, 5, 8),)),
    "upsampling": (
        nn.Sequential(
            nn.ConvTranspose2d(3, 4, 2, stride=2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.PixelShuffle(2)
        ),
        (torch.randn(1, 3, 4, 4),),
    ),
    "lstm": (_Function(lambda layer, x: layer(x)[0], nn.LSTM(6, 5, batch_first=True)), (torch.randn(2, 4, 6),)),
    "lstm_both_ways": (
        _Function(lambda layer, x: layer(x)[0], nn.LSTM(6, 5, bidirectional=True)),
        (torch.randn(4, 2, 6),),
    ),
    "rnn": (_Function(lambda layer, x: layer(x)[0], nn.RNN(6, 5)), (torch.randn(4, 2, 6),)),
    "gru": (_Function(lambda layer, x: layer(x)[0], nn.GRU(6, 5)), (torch.randn(4, 2, 6),)),
}


def _assert_close(results: list[np.ndarray], wanted: Any, tolerance: float = 5e-3) -> None:
    expected = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(results) == len(expected)
    for result, tensor in zip(results, expected, strict=True):
        array = tensor.detach().numpy()
        assert result.shape == array.shape
        np.testing.assert_allclose(result, array, rtol=tolerance, atol=tolerance * max(1.0, np.abs(array).max()))


@pytest.mark.parametrize("name", MODULES)
def test_converted_module(name: str, tmp_path: Path) -> None:
    """A converted module equals torch within the accuracy of fp16."""
    module, example = MODULES[name]
    module.eval()
    path = tmp_path / "p.mlpackage"
    convert_torch(module, example, path)
    feeds = {f"x{number}": value.numpy() for number, value in enumerate(example)}
    with torch.no_grad():
        wanted = module(*example)
    _assert_close(run_package(path, feeds), wanted)


class _StatefulAttention(nn.Module):
    """One attention layer that keeps keys and values in states."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48, bias=False)
        self.register_buffer("keys", torch.zeros(1, 12, 16, dtype=torch.float16))
        self.register_buffer("values", torch.zeros(1, 12, 16, dtype=torch.float16))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        end = mask.shape[-1]
        start = end - x.shape[-2]
        self.keys[:, start:end] = key.half()
        self.values[:, start:end] = value.half()
        scores = query @ self.keys[:, :end].float().transpose(-1, -2) / 4 + mask
        return scores.softmax(-1) @ self.values[:, :end].float()


def test_attention_with_states(tmp_path: Path) -> None:
    """A stateful module with lengths chosen at run time, called several times, equals the whole sequence
    at once."""
    module = _StatefulAttention()
    path = tmp_path / "p.mlpackage"
    length, end = ct.RangeDim(1, 12, default=2), ct.RangeDim(1, 12, default=2)
    half = {"shape": (1, 12, 16), "dtype": np.float16}
    convert_torch(
        module,
        (torch.zeros(1, 2, 16), torch.zeros(1, 2, 2)),
        path,
        inputs=[
            ct.TensorType(name="x", shape=(1, length, 16), dtype=np.float32),
            ct.TensorType(name="mask", shape=(1, length, end), dtype=np.float32),
        ],
        states=[ct.StateType(wrapped_type=ct.TensorType(**half), name=name) for name in ("keys", "values")],
    )
    translation = translate_package(path)
    assert set(translation.state_inputs) == set(translation.state_outputs) == {"keys", "values"}
    x = torch.randn(1, 7, 16)
    whole_mask = torch.full((1, 7, 7), -1e4).triu(1)
    with torch.no_grad():
        query, key, value = module.project(x).chunk(3, -1)
        wanted = (query @ key.mT / 4 + whole_mask).softmax(-1) @ value
    states = {name: np.zeros((1, 12, 16), np.float32) for name in ("keys", "values")}
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        feeds = {"x": x[:, start:stop].numpy(), "mask": whole_mask[:, start:stop, :stop].numpy()}
        for name, state in states.items():
            feeds[translation.state_inputs[name]] = state
        results = run_translation(translation, feeds, path)
        states = {name: results[output] for name, output in translation.state_outputs.items()}
        for state in states.values():
            np.testing.assert_array_equal(state, state.astype(np.float16))
            assert not state[:, stop:].any()
        (output,) = (results[name] for name in translation.outputs)
        np.testing.assert_allclose(output, wanted[:, start:stop], rtol=5e-3, atol=5e-3)


def test_lengths_chosen_at_run_time(tmp_path: Path) -> None:
    """A module converted for a range of lengths runs at each of them."""
    path = tmp_path / "p.mlpackage"
    inputs = [ct.TensorType(name="x0", shape=(2, ct.RangeDim(1, 32, default=5), 8))]
    module = _Function(lambda x: F.softmax(x @ x.transpose(1, 2), -1).sum(1).reshape(-1, 1))
    convert_torch(module, (torch.zeros(2, 5, 8),), path, inputs=inputs)
    for length in (1, 4, 9):
        x = torch.randn(2, length, 8)
        _assert_close(run_package(path, {"x0": x.numpy()}), module(x))


def _compressed(kind: str, model: Any) -> Any:
    optimise = ct.optimize.coreml
    if kind == "palettised":
        options: Any = optimise.OpPalettizerConfig(mode="uniform", nbits=6, weight_threshold=64)
        return optimise.palettize_weights(model, optimise.OptimizationConfig(global_config=options))
    if kind == "pruned":
        options = optimise.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=64)
        return optimise.prune_weights(model, optimise.OptimizationConfig(global_config=options))
    dtype, granularity = kind.split("_", 1)
    options = optimise.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype=dtype, granularity=granularity, block_size=32, weight_threshold=64
    )
    return optimise.linear_quantize_weights(model, optimise.OptimizationConfig(global_config=options))


@pytest.mark.parametrize("kind", ["int8_per_channel", "int4_per_block", "int8_per_tensor", "palettised", "pruned"])
def test_compressed_package(kind: str, tmp_path: Path) -> None:
    """Packages compressed by coremltools equal the network with their decompressed weights."""
    torch.manual_seed(1)
    layers = [nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 32, 3)]
    network, x = nn.Sequential(*layers), torch.randn(6, 64)
    plain, path = tmp_path / "plain.mlpackage", tmp_path / "p.mlpackage"
    with quiet():
        model = _compressed(kind, convert_torch(network, (x,), plain))
        model.save(str(path))
        ct.optimize.coreml.decompress_weights(model).save(str(plain))
    wanted = run_package(plain, {"x0": x.numpy()})[0]
    exact = run_package(path, {"x0": x.numpy()}, exact=True)[0]
    np.testing.assert_allclose(exact, wanted, rtol=5e-3, atol=5e-3)
    fast = run_package(path, {"x0": x.numpy()})[0]
    assert np.abs(fast - wanted).max() < 0.03 * np.abs(wanted).max()
    with torch.no_grad():  # the decompressed network is still near the original one
        assert np.corrcoef(wanted.ravel(), network(x).numpy().ravel())[0, 1] > 0.85


def test_unsupported_operation_is_named(tmp_path: Path) -> None:
    """The error for an operation without translation names operation, function and package."""
    x = np.ones((4, 5), np.float32)
    path = save_program(
        lambda x: mb.add(x=x, y=mb.random_normal(shape=[4, 5], name="noise")), {"x": x}, tmp_path / "noisy.mlpackage"
    )
    message = r"noisy\.mlpackage.*random_normal \('noise' in function 'main'"
    with pytest.raises(UnsupportedOperationError, match=message):
        translate_package(path)


def test_unsupported_form_is_named(tmp_path: Path) -> None:
    """A form of an operation that has no translation is named with the reason."""
    x = np.ones((1, 1, 4, 5), np.float32)
    path = save_program(
        lambda x: mb.resize_bilinear(x=x, target_size_height=8, target_size_width=5, sampling_mode="OFFSET_CORNERS"),
        {"x": x},
        tmp_path / "p.mlpackage",
    )
    with pytest.raises(UnsupportedOperationError, match=r"resize_bilinear.*sampling_mode OFFSET_CORNERS"):
        translate_package(path)


def test_malformed_operation_is_an_error(tmp_path: Path) -> None:
    """Operations with missing, wrong or contradictory arguments give an error, no traceback of something else."""
    kind = TensorType("float32", (2, 3))
    for operation_type, arguments in (
        ("transpose", {"x": ("x",)}),
        ("transpose", {"x": ("x",), "perm": (Constant(TensorType("string", ()), inline=np.array("a", object)),)}),
        ("concat", {"values": ()}),
        ("conv", {"x": ("x",), "weight": ("x",)}),
        ("while_loop", {"loop_vars": ("x",)}),
        ("read_state", {"input": ("x",)}),
        ("reduce_argmax", {"x": ("x",), "axis": (Constant(TensorType("int32", ()), inline=np.int32(7)),)}),
    ):
        operation = Operation(operation_type, "y", arguments, (("y", kind),), {})
        function = Function("main", {"x": kind}, {}, [operation], ("y",), "CoreML8")
        with pytest.raises(PackageError, match=rf"broken\.mlpackage.*{operation_type} \('y'"):
            translate_function(function, package="broken.mlpackage")


def test_unused_operations_do_not_matter(tmp_path: Path) -> None:
    """An operation that no output needs is not translated."""

    def build(x: Any) -> Any:
        mb.random_normal(shape=[4, 5])
        return mb.exp(x=x)

    x = np.ones((4, 5), np.float32)
    path = save_program(build, {"x": x}, tmp_path / "p.mlpackage")
    np.testing.assert_allclose(run_package(path, {"x": x})[0], np.exp(x), rtol=1e-6)


class _Rewrite:
    """Takes the mul and the add and subtracts instead; hides the input y, brings one of its own."""

    def claims(self, function: Function) -> list[Claim]:
        """One claim for both operations."""
        names = frozenset(op.name for op in function.operations if op.type in ("mul", "add"))
        (result,) = (op.outputs[0][0] for op in function.operations if op.type == "add")

        def emit(context: Context) -> None:
            extra = context.graph.add_input("extra", 1, [4])
            context.graph.add_output("echo", extra, 1)
            context.define(result, context.graph.emit("Sub", [context.tensor("x"), extra]))

        return [Claim(names, emit, frozenset({"y"}))]


class _ForgetfulRewrite:
    """Claims an operation and gives nothing in its place."""

    def claims(self, function: Function) -> list[Claim]:
        """One claim, for the first operation."""
        return [Claim(frozenset({function.operations[0].name}), lambda context: None)]


def test_rewrite_claims_operations_and_hides_inputs(tmp_path: Path) -> None:
    """A claim replaces its operations, hides inputs, declares inputs and outputs."""

    def build(x: Any, y: Any) -> Any:
        return mb.exp(x=mb.add(x=mb.mul(x=y, y=2.0), y=x))

    values = {"x": np.arange(4, dtype=np.float32), "y": np.ones(4, np.float32)}
    path = save_program(build, values, tmp_path / "p.mlpackage")
    function = open_package(path).functions["main"]
    translation = translate_function(function, rewrites=[_Rewrite()], package=path)
    assert set(translation.inputs) == {"x"}
    results = run_translation(translation, {"x": values["x"], "extra": np.full(4, 0.5, np.float32)}, path)
    np.testing.assert_allclose(results["echo"], 0.5)
    (name,) = translation.outputs
    np.testing.assert_allclose(results[name], np.exp(values["x"] - 0.5), rtol=1e-6)
    with pytest.raises(PackageError, match="not available"):
        translate_function(function, rewrites=[_ForgetfulRewrite()], package=path)


def test_condition_and_loop(tmp_path: Path) -> None:
    """Conditions and loops with values from outside, nested in each other."""

    def build(x: Any, n: Any) -> Any:
        shift = mb.exp(x=x)

        def step(value: Any, count: Any) -> Any:
            odd = mb.cast(x=mb.mod(x=count, y=2), dtype="bool")
            more = mb.cond(
                pred=mb.squeeze(x=odd),
                _true_fn=lambda: mb.add(x=value, y=shift),
                _false_fn=lambda: mb.mul(x=value, y=2.0),
            )
            return more, mb.sub(x=count, y=1)

        looped = mb.while_loop(
            _cond=lambda value, count: mb.squeeze(x=mb.greater(x=count, y=0)), _body=step, loop_vars=(x, n)
        )
        return mb.add(x=looped[0], y=shift)

    x = np.array([0.0, 0.5], np.float32)
    path = save_program(build, {"x": x, "n": np.ones(1, np.int32)}, tmp_path / "p.mlpackage")
    for count in (0, 1, 4):
        wanted, shift = x, np.exp(x)
        for left in range(count, 0, -1):
            wanted = wanted + shift if left % 2 else wanted * 2
        (result,) = run_package(path, {"x": x, "n": np.array([count], np.int32)})
        np.testing.assert_allclose(result, wanted + shift, rtol=1e-6)
