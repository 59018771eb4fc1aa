"""MIL building blocks of a Gemma decoder: norm, quantised linear, rotary embedding, stateful attention, MLP.

One `FunctionEmitter` builds one function. All functions of a package are the same text; only the number of rows
S and the length of the prefix view differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb  # noqa: N813

from llm_gemma_coreml.bundle.manifest_checks import BLOCK
from llm_gemma_coreml.convert.exporter import placeholder_constant
from llm_gemma_coreml.convert.source import FULL, SLIDING, ModelConfig
from llm_gemma_coreml.convert.weight_table import WeightTable

Var = Any
"""A value of the MIL function that is being built (coremltools has no types)."""

MASKED_SCORE = -30000.0
"""Score of a slot that a row does not see: finite in fp16, and its exponential is exactly zero."""
WRITE_FORMS = ("slice_update", "one_hot", "gather")
ATTENTION_FORMS = ("explicit", "sdpa")


@dataclass(frozen=True)
class LayerFunction:
    """What distinguishes a function of a layer package. Sizes are counts of rows, slots and tokens."""

    rung: int
    width: int
    largest_rung: int
    ring_capacity: int
    write_form: str = "slice_update"
    """How new rows get into a state; one of WRITE_FORMS. The portable runtime is fast for the first only."""
    attention_form: str = "explicit"
    """One of ATTENTION_FORMS. The portable runtime is fast for the first only."""

    def view_rows(self, kind: str) -> int:
        """Slots that attention reads."""
        return self.ring_capacity if kind == SLIDING else self.rung

    def state_rows(self, kind: str) -> int:
        """Rows of a state: the same in every function of the bundle."""
        return (self.ring_capacity if kind == SLIDING else self.largest_rung) + BLOCK


class FunctionEmitter:
    """Emits operations into the function that is open (`with Function(...)`); `inputs` holds its inputs and states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightTable,
        inputs: dict[str, Var],
        layout: LayerFunction | None = None,
    ) -> None:
        self.config = config
        self._weights = weights
        self._inputs = inputs
        self._layout = layout
        self._constants: dict[str, Var] = {}
        self._masks: dict[str, Var] = {}
        self._bounds: dict[str, tuple[Var, Var]] = {}
        self._views: dict[str, Var] = {}

    @property
    def layout(self) -> LayerFunction:
        assert self._layout is not None, "only functions of layer packages have states"
        return self._layout

    def constant(self, weight_id: str) -> Var:
        """The constant with that id of the weight table."""
        if weight_id not in self._constants:
            self._constants[weight_id] = placeholder_constant(weight_id, self._weights[weight_id])
        return self._constants[weight_id]

    def norm(self, x: Var, weight: str | None, name: str, factor: float = 1.0) -> Var:
        """RMS norm of fp32 x over the last axis; times the 1-D tensor `weight` and `factor` if there is one."""
        square = mb.mul(x=x, y=x, name=f"{name}_square")
        mean = mb.reduce_mean(x=square, axes=[-1], keep_dims=True, name=f"{name}_mean")
        shifted = mb.add(x=mean, y=np.float32(self.config.rms_norm_epsilon), name=f"{name}_shifted")
        inverse = mb.rsqrt(x=shifted, name=f"{name}_inverse")
        if weight is None:
            return mb.mul(x=x, y=inverse, name=name)
        scaled = mb.mul(x=x, y=inverse, name=f"{name}_scaled")
        return mb.mul(x=scaled, y=self.constant(self._weights.vector(weight, factor)), name=name)

    def linear(self, x: Var, parts: Sequence[str], name: str) -> Var:
        """x [S, K] times the transposed weight made of the tensors `parts` [N, K], in fp16: fp16 [S, N]."""
        weight = self._weights.linear(name, parts)
        values = self.constant(weight.values)
        if weight.tables is not None:
            tables = self.constant(weight.tables)
            values = mb.constexpr_lut_to_dense(indices=values, lut=tables, name=f"{name}_weight")
        if weight.scales is not None:
            scales = self.constant(weight.scales)
            values = mb.constexpr_blockwise_shift_scale(data=values, scale=scales, name=f"{name}_weight")
        bias = self.constant(self._weights.zeros(weight.rows))
        return mb.linear(x=self.half(x), weight=values, bias=bias, name=name)

    def half(self, x: Var) -> Var:
        """x as fp16."""
        return x if x.dtype.__name__ == "fp16" else mb.cast(x=x, dtype="fp16", name=f"{x.name}_fp16")

    def single(self, x: Var) -> Var:
        """x as fp32."""
        return x if x.dtype.__name__ == "fp32" else mb.cast(x=x, dtype="fp32", name=f"{x.name}_fp32")

    def add_between_norms(
        self, hidden: Var, layer: int, norms: tuple[str, str], compute: Callable[[Var], Var], result: str
    ) -> Var:
        """Half of a decoder layer: the residual stream `hidden`, fp32 [S, H], plus the second norm of what `compute` makes
        of the first norm of it."""
        before, after = norms
        normed = self.norm(hidden, f"layers.{layer}.{before}", f"layer_{layer}_{before}")
        computed = self.norm(self.single(compute(normed)), f"layers.{layer}.{after}", f"layer_{layer}_{after}")
        return mb.add(x=hidden, y=computed, name=result)

    def scaled(self, x: Var, tensor: str, name: str) -> Var:
        """fp32 x times the one number of the 1-D tensor."""
        return mb.mul(x=x, y=self.constant(self._weights.vector(tensor)), name=name)

    def rotary(self, x: Var, kind: str, name: str) -> Var:
        """Rotate fp32 x [..., S, D] by the angles of the rows' positions (half layout)."""
        cos, sin = self._inputs[f"cos_{kind}"], self._inputs[f"sin_{kind}"]
        first, second = mb.split(x=x, num_splits=2, axis=-1, name=f"{name}_halves")
        rotated_first = mb.sub(
            x=mb.mul(x=first, y=cos, name=f"{name}_first_cos"),
            y=mb.mul(x=second, y=sin, name=f"{name}_second_sin"),
            name=f"{name}_first",
        )
        rotated_second = mb.add(
            x=mb.mul(x=second, y=cos, name=f"{name}_second_cos"),
            y=mb.mul(x=first, y=sin, name=f"{name}_first_sin"),
            name=f"{name}_second",
        )
        return mb.concat(values=[rotated_first, rotated_second], axis=-1, name=name)

    def queries(self, x: Var, layer: int, name: str) -> Var:
        """Projected queries [S, heads * D] as `attention` wants them: normed, rotated, fp16 [KV, G, S, D]."""
        kv_heads, head_dim = self.config.kv_heads(layer), self.config.head_dim(layer)
        group = self.config.query_heads // kv_heads
        apart = mb.reshape(x=self.single(x), shape=[-1, kv_heads, group, head_dim], name=f"{name}_q_heads")
        heads = mb.transpose(x=apart, perm=[1, 2, 0, 3], name=f"{name}_q")
        # The norm's weight carries the factor on the scores, so that they need no multiplication of their own.
        normed = self.norm(heads, f"layers.{layer}.q_norm", f"{name}_q_norm", factor=self.query_factor(layer))
        return self.half(self.rotary(normed, self.config.layer_types[layer], f"{name}_q_rotary"))

    def kv_heads(self, x: Var, layer: int, name: str) -> Var:
        """Projected keys or values [S, KV * D] with heads first: [KV, S, D]."""
        shape = [-1, self.config.kv_heads(layer), self.config.head_dim(layer)]
        return mb.transpose(x=mb.reshape(x=x, shape=shape, name=f"{name}_heads"), perm=[1, 0, 2], name=name)

    def keys(self, heads: Var, layer: int, name: str) -> Var:
        """fp32 keys [KV, S, D] as `attention` wants them: normed, rotated, fp16."""
        normed = self.norm(heads, f"layers.{layer}.k_norm", f"{name}_k_norm")
        return self.half(self.rotary(normed, self.config.layer_types[layer], f"{name}_k_rotary"))

    def query_factor(self, layer: int) -> float:
        """What queries must be multiplied by before `attention`."""
        fused = self.layout.attention_form == "sdpa"
        return self.config.query_scale * (self.config.head_dim(layer) ** 0.5 if fused else 1)

    def attention(self, query: Var, key: Var, value: Var, layer: int, name: str) -> Var:
        """Write the new rows, then attend over the prefix view of the states.

        query fp16 [KV, G, S, D], times `query_factor`; key, value fp16 [KV, S, D]. Returns fp16 [S, KV * G * D].
        """
        kind = self.config.layer_types[layer]
        keys = self._write_and_view(key, f"k_{layer}", kind, f"{name}_keys")
        values = self._write_and_view(value, f"v_{layer}", kind, f"{name}_values")
        return self._attend(query, keys, values, self.mask(kind), name)

    def attention_to(self, query: Var, source_layer: int, kind: str, name: str) -> Var:
        """Attend over the prefix view of another layer's states, which are only read; arguments as in `attention`."""
        keys, values = (self._view(f"{part}_{source_layer}", kind) for part in "kv")
        return self._attend(query, keys, values, self.mask(kind), name)

    def _attend(self, query: Var, keys: Var, values: Var, mask: Var, name: str) -> Var:
        kv_heads, group, _, head_dim = query.shape
        # The query heads of a KV head are folded into rows, so that one product per KV head serves them all.
        folded = mb.reshape(x=query, shape=[kv_heads, -1, head_dim], name=f"{name}_query")
        attend = self._explicit_attention if self.layout.attention_form == "explicit" else self._fused_attention
        mixed = attend(folded, keys, values, group, mask, name)
        apart = mb.reshape(x=mixed, shape=[kv_heads, group, -1, head_dim], name=f"{name}_mixed_heads")
        rows_first = mb.transpose(x=apart, perm=[2, 0, 1, 3], name=f"{name}_mixed_rows")
        return mb.reshape(x=rows_first, shape=[-1, kv_heads * group * head_dim], name=f"{name}_mixed")

    def _explicit_attention(self, query: Var, keys: Var, values: Var, group: int, mask: Var, name: str) -> Var:
        """The pattern that the portable runtime recognises: see runtime/portable/attention.py.

        scores = matmul(query [KV, G*S, D], keys [KV, W, D] transposed) -> reshape [KV, G, S, W]
        -> select(mask [S, W], scores, MASKED_SCORE) -> softmax -> reshape [KV, G*S, W]
        -> matmul(values [KV, W, D]).
        """
        kv_heads, slots = keys.shape[0], keys.shape[1]
        scores = mb.matmul(x=query, y=keys, transpose_y=True, name=f"{name}_scores")
        unfolded = mb.reshape(x=scores, shape=[kv_heads, group, -1, slots], name=f"{name}_scores_heads")
        masked = mb.select(cond=mask, a=unfolded, b=np.float16(MASKED_SCORE), name=f"{name}_scores_masked")
        weights = mb.softmax(x=masked, axis=-1, name=f"{name}_weights")
        folded = mb.reshape(x=weights, shape=[kv_heads, -1, slots], name=f"{name}_weights_folded")
        return mb.matmul(x=folded, y=values, name=f"{name}_sum")

    def _fused_attention(self, query: Var, keys: Var, values: Var, group: int, mask: Var, name: str) -> Var:
        """Core ML's own attention operation; it divides by sqrt(D), which `query_factor` makes up for."""
        repeated = mb.tile(x=mask, reps=[group, 1], name=f"{name}_mask")
        per_head = mb.tile(
            x=mb.expand_dims(x=repeated, axes=[0], name=f"{name}_mask_expanded"),
            reps=[keys.shape[0], 1, 1],
            name=f"{name}_mask_heads",
        )
        return mb.scaled_dot_product_attention(query=query, key=keys, value=values, attn_mask=per_head, name=f"{name}_sum")

    def mask(self, kind: str) -> Var:
        """Which slots each row sees, bool [S, W]; made once per function, shared by all layers of the kind."""
        if kind not in self._masks:
            self._masks[kind] = self._emit_mask(kind)
        return self._masks[kind]

    def _emit_mask(self, kind: str) -> Var:
        # Only elementwise operations on the two position inputs: the portable runtime builds this graph again
        # for other sets of slots, and finds the slots by the comparison with zero.
        name = f"{kind}_mask"
        rows = mb.expand_dims(x=self._inputs["query_positions"], axes=[1], name=f"{name}_rows")
        slots = mb.expand_dims(x=self._inputs[f"{kind}_slot_positions"], axes=[0], name=f"{name}_slots")
        filled = mb.greater_equal(x=slots, y=np.int32(0), name=f"{name}_filled")
        past = mb.less_equal(x=slots, y=rows, name=f"{name}_past")
        if kind == FULL:
            return mb.logical_and(x=filled, y=past, name=name)
        visible = mb.logical_and(x=filled, y=past, name=f"{name}_visible")
        oldest = mb.sub(x=rows, y=np.int32(self.config.sliding_window), name=f"{name}_oldest")
        near = mb.greater(x=slots, y=oldest, name=f"{name}_near")
        return mb.logical_and(x=visible, y=near, name=name)

    def _write_and_view(self, rows: Var, state: str, kind: str, name: str) -> Var:
        """Write fp16 rows [KV, S, D] at the write start; the first slots of the written state [KV, W, D]."""
        handle = self._inputs[state]
        current = mb.read_state(input=handle, name=f"{name}_read")
        written = getattr(self, f"_write_{self.layout.write_form}")(current, rows, kind, f"{name}_update")
        # coremltools wants each state update directly after the operation that makes its value.
        updated = mb.coreml_update_state(state=handle, value=written, name=f"{name}_state")
        return self._prefix(updated, kind, name)

    def _view(self, state: str, kind: str) -> Var:
        """The first slots of a state that this function does not write [KV, W, D]; read once per function."""
        if state not in self._views:
            current = mb.read_state(input=self._inputs[state], name=f"{state}_read")
            self._views[state] = self._prefix(current, kind, f"{state}_view")
        return self._views[state]

    def _prefix(self, rows: Var, kind: str, name: str) -> Var:
        kv_heads, _, head_dim = rows.shape
        size = [kv_heads, self.layout.view_rows(kind), head_dim]
        return mb.slice_by_size(x=rows, begin=[0, 0, 0], size=size, name=name)

    def _write_slice_update(self, current: Var, rows: Var, kind: str, name: str) -> Var:
        if kind not in self._bounds:
            start = self._inputs[f"{kind}_write_start"]
            end = mb.add(x=start, y=np.int32(self.layout.width), name=f"{kind}_write_end")
            zero = np.zeros(1, np.int32)
            heads, dim = (np.array([rows.shape[axis]], np.int32) for axis in (0, 2))
            self._bounds[kind] = (
                mb.concat(values=[zero, start, zero], axis=0, name=f"{kind}_write_begin_index"),
                mb.concat(values=[heads, end, dim], axis=0, name=f"{kind}_write_end_index"),
            )
        begin, end = self._bounds[kind]
        return mb.slice_update(x=current, update=rows, begin=begin, end=end, name=name)

    def _row_offsets(self, current: Var, kind: str, name: str) -> Var:
        """Index of each row of the state relative to the write start, int32 [rows]."""
        length = current.shape[1]
        rows = self._weights.array(f"row_indices.{length}", lambda: np.arange(length, dtype=np.int32), (length,), "int32")
        return mb.sub(x=self.constant(rows), y=self._inputs[f"{kind}_write_start"], name=f"{name}_offsets")

    def _write_one_hot(self, current: Var, rows: Var, kind: str, name: str) -> Var:
        offsets = mb.expand_dims(x=self._row_offsets(current, kind, name), axes=[1], name=f"{name}_column")
        hits = mb.equal(x=offsets, y=np.arange(self.layout.width, dtype=np.int32)[None], name=f"{name}_hits")
        one_hot = mb.cast(x=hits, dtype="fp16", name=f"{name}_one_hot")
        placed = mb.matmul(x=one_hot, y=rows, name=f"{name}_placed")
        touched = mb.reduce_sum(x=one_hot, axes=[1], keep_dims=True, name=f"{name}_touched")
        kept = mb.mul(x=current, y=mb.sub(x=np.float16(1), y=touched, name=f"{name}_keep"), name=f"{name}_kept")
        return mb.add(x=kept, y=placed, name=name)

    def _write_gather(self, current: Var, rows: Var, kind: str, name: str) -> Var:
        offsets = self._row_offsets(current, kind, name)
        length = current.shape[1]
        fresh = mb.logical_and(
            x=mb.greater_equal(x=offsets, y=np.int32(0), name=f"{name}_after"),
            y=mb.less(x=offsets, y=np.int32(self.layout.width), name=f"{name}_before"),
            name=f"{name}_fresh",
        )
        indices = mb.select(
            cond=fresh,
            a=mb.add(x=offsets, y=np.int32(length), name=f"{name}_fresh_index"),
            b=self.constant(f"row_indices.{length}"),
            name=f"{name}_indices",
        )
        joined = mb.concat(values=[current, rows], axis=1, name=f"{name}_joined")
        return mb.gather(x=joined, indices=indices, axis=1, name=name)

    def gated_mlp(self, x: Var, layer: int, name: str) -> Var:
        """down(gelu(gate(x)) * up(x)) with gate and up in one linear: fp16 [S, H]."""
        prefix = f"layers.{layer}"
        both = self.linear(x, [f"{prefix}.gate", f"{prefix}.up"], f"{name}_gate_up")
        gate, up = mb.split(x=both, num_splits=2, axis=-1, name=f"{name}_halves")
        active = mb.gelu(x=gate, mode="TANH_APPROXIMATION", name=f"{name}_active")
        product = mb.mul(x=active, y=up, name=f"{name}_product")
        return self.linear(product, [f"{prefix}.down"], f"{name}_down")

    def logits(self, hidden: Var) -> Var:
        """Logits, fp32 [S, V], of the final hidden states: tied embedding, then the softcap if there is one."""
        raw = self.linear(hidden, ["embedding"], "embedding")
        cap = self.config.final_softcap
        if cap is None:
            return mb.cast(x=raw, dtype="fp32", name="logits")
        capped = mb.tanh(x=mb.mul(x=self.single(raw), y=np.float32(1 / cap), name="logits_scaled"), name="logits_tanh")
        return mb.mul(x=capped, y=np.float32(cap), name="logits")
