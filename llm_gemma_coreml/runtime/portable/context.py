"""The state of one translation: which MIL value is which ONNX value, on demand, with claimed operations
set apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llm_gemma_coreml.bundle.program import Block, Constant, Function, Operation, TensorType
from llm_gemma_coreml.errors import PackageError, UnsupportedOperationError
from llm_gemma_coreml.runtime.portable.graph import ELEMENT_TYPES, EMBEDDED_BYTES, GraphBuilder
from llm_gemma_coreml.runtime.portable.recipes import Source, WeightReader, WeightRecipe, evaluate
from llm_gemma_coreml.runtime.portable.values import TRANSLATORS, OperationView, Value


@dataclass(frozen=True)
class Claim:
    """Operations of a function that are translated together, in another form than one by one.

    `emit(context)` is called once. It reads what it needs with `context.tensor(name)`,
    emits nodes with `context.graph`, may declare model inputs and outputs there, and gives every result that
    operations outside of the claim use to `context.define(name, onnx_name)`.
    """

    operations: frozenset[str]
    """Names of the operations (names of operations are their first output's, or their own for
    write_state)."""
    emit: Callable[[Context], None]
    hidden_inputs: frozenset[str] = field(default_factory=frozenset)
    """Function inputs and states that this claim handles itself: they are not declared as inputs and
    outputs."""


class Context:
    """Values and operations of one function during its translation."""

    def __init__(self, function: Function, graph: GraphBuilder, package: str, *, exact: bool, symbolic: bool) -> None:
        self.function = function
        self.graph = graph
        self.package = package
        self.exact = exact
        """True: weights are used as fp32 in every product."""
        self.symbolic = symbolic
        """True: sizes in the MIL types need not be those of the run."""
        self._outer: Context | None = None
        self._values: dict[str, Value] = {}
        self._stored: dict[int, str] = {}
        self._rounded: dict[int, str] = {}
        self._claim_of: dict[int, Claim] = {}
        self._emitted: set[int] = set()
        self._producer: dict[str, Operation] = {
            name: operation for operation in function.operations for name, _ in operation.outputs
        }
        self._version: dict[int, Operation] = {}
        self.last_write: dict[str, Operation] = {}
        self._follow_states()

    def _follow_states(self) -> None:
        """Find which write each read of a state sees: from here on states are plain values."""
        for operation in self.function.operations:
            if operation.type not in ("read_state", "write_state"):
                continue
            (state,) = operation.inputs.get("input", ("",))
            if not isinstance(state, str) or state not in self.function.states:
                raise self.unsupported(operation, "its input is not a state of the function")
            if operation.type == "write_state":
                self.last_write[state] = operation
            elif state in self.last_write:
                self._version[id(operation)] = self.last_write[state]

    # Claims

    def add_claim(self, claim: Claim) -> None:
        """Take the claim's operations out of the ordinary translation.

        Raises PackageError if two claims overlap.
        """
        found = [operation for operation in self.function.operations if operation.name in claim.operations]
        if len(found) != len(claim.operations) or any(id(operation) in self._claim_of for operation in found):
            raise PackageError(f"{self.package}: operations of function {self.function.name!r} cannot be told apart.")
        for operation in found:
            self._claim_of[id(operation)] = claim

    def claimed(self, operation: Operation) -> bool:
        """True if some claim translates the operation."""
        return id(operation) in self._claim_of

    # Values

    def define(self, name: str, value: str | Value) -> None:
        """Say which ONNX value (or stored value) a MIL value is."""
        if isinstance(value, str):
            value = Value(self.type_of(name), value)
        self._values[name] = value

    def producer(self, name: str) -> Operation | None:
        """The operation of this function or block that gives the value."""
        return self._producer.get(name)

    def type_of(self, name: str) -> TensorType:
        """The MIL type of a value, input or state."""
        if name in self._producer:
            return next(kind for output, kind in self._producer[name].outputs if output == name)
        if name in self.function.constants:
            return self.function.constants[name].type
        if self._outer is not None and name not in self.function.inputs:
            return self._outer.type_of(name)
        return self.function.inputs[name] if name in self.function.inputs else self.function.states[name]

    def value(self, item: str | Constant) -> Value:
        """The value of that name; operations are translated when a value of theirs is first asked for."""
        if isinstance(item, Constant):
            return Value(item.type, constant=item)
        if item not in self._values:
            if item in self.function.constants:
                constant = self.function.constants[item]
                self._values[item] = Value(constant.type, constant=constant)
            elif item in self._producer:
                self.translate(self._producer[item])
            elif self._outer is not None:
                self._values[item] = self._outer.value(item)
        if item not in self._values:
            raise PackageError(
                f"{self.package}: function {self.function.name!r} uses {item!r}, which is not available."
            )
        return self._values[item]

    def tensor(self, name: str) -> str:
        """The ONNX name of a MIL value."""
        return self.materialise(self.value(name))

    def materialise(self, value: Value) -> str:
        """The ONNX name of a value; a stored one becomes an initialiser of fp32, int32 or bool."""
        if value.name is not None:
            return value.name
        if value.constant is not None:
            key = id(value.constant)
            if key not in self._stored:
                self._stored[key] = self._constant(value.constant)
            return self._stored[key]
        assert value.recipe is not None
        return self.initialiser(value.recipe)

    def _constant(self, constant: Constant) -> str:
        recipe = constant_recipe(constant)
        if recipe.nbytes <= EMBEDDED_BYTES:
            return self.graph.constant(constant.value().astype(recipe.dtype))
        return self.graph.weight(recipe)

    def initialiser(self, recipe: WeightRecipe) -> str:
        """The ONNX name of what the recipe makes; small results that need no weight file are put into the
        graph."""
        if recipe.nbytes <= EMBEDDED_BYTES and not _reads_file(recipe):
            return self.graph.constant(evaluate(recipe, WeightReader.without_files()))
        return self.graph.weight(recipe)

    # Operations

    def translate(self, operation: Operation) -> None:
        """Translate one operation (with its claim, if it has one) unless that is done."""
        claim = self._claim_of.get(id(operation))
        token = id(claim) if claim is not None else id(operation)
        if token in self._emitted:
            return
        self._emitted.add(token)
        if claim is not None:
            claim.emit(self)
            return
        for (name, _), value in zip(operation.outputs, self.results(operation), strict=True):
            self.define(name, value)

    def results(self, operation: Operation) -> list[str | Value]:
        """Emit the nodes of one operation and return its results."""
        if operation.type == "read_state":
            return [self.read_state(operation)]
        if operation.type == "write_state":
            return []
        translator = TRANSLATORS.get(operation.type)
        if translator is None:
            raise self.unsupported(operation)
        try:
            result = translator(OperationView(operation, self), self.graph)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PackageError(
                f"{self.package}: operation {operation.type} ({operation.name!r} in function "
                f"{self.function.name!r}) is malformed ({error!r}). Build or get the package again."
            ) from error
        results = [result] if isinstance(result, str | Value) else list(result)
        return results[: len(operation.outputs)]

    def read_state(self, operation: Operation) -> str:
        """The value that a read_state gives: the state's input, or what the write before it stored."""
        write = self._version.get(id(operation))
        if write is not None:
            return self.written(write)
        state = operation.inputs["input"][0]
        assert isinstance(state, str)
        return self.tensor(state)

    def written(self, write: Operation) -> str:
        """The value that a write_state stores, rounded to the state's type."""
        if id(write) not in self._rounded:
            state = write.inputs["input"][0]
            assert isinstance(state, str)
            stored = OperationView(write, self).tensor("data")
            if self.function.states[state].dtype == "float16":
                stored = self.graph.round_to_half(stored)
            self._rounded[id(write)] = stored
        return self._rounded[id(write)]

    def live_operations(self) -> list[Operation]:
        """Operations whose results matter, in order: they reach an output of the function or a state."""
        pending: list[str] = [*self.function.outputs]
        live: set[int] = set()
        for state_write in self.last_write.values():
            self._mark(state_write, live, pending)
        while pending:
            operation = self._producer.get(pending.pop())
            if operation is not None:
                self._mark(operation, live, pending)
        return [operation for operation in self.function.operations if id(operation) in live]

    def _mark(self, operation: Operation, live: set[int], pending: list[str]) -> None:
        if id(operation) in live:
            return
        claim = self._claim_of.get(id(operation))
        group = [operation]
        if claim is not None:
            group = [each for each in self.function.operations if self._claim_of.get(id(each)) is claim]
        for each in group:
            live.add(id(each))
            pending.extend(item for bound in each.inputs.values() for item in bound if isinstance(item, str))
            for block in each.blocks:
                pending.extend(_names_used(block.operations))
                pending.extend(block.outputs)
            if id(each) in self._version:
                write = self._version[id(each)]
                if id(write) not in live:
                    self._mark(write, live, pending)

    # Nested blocks

    def nested(self, block: Block) -> Context:
        """The context of a nested block, which also sees the values defined around it."""
        function = self.function
        inside = Function(
            function.name, block.inputs, {}, block.operations, block.outputs, function.opset, block.constants
        )
        inner = Context(inside, self.graph, self.package, exact=self.exact, symbolic=True)
        inner._outer = self
        inner._stored = self._stored
        return inner

    def prepare(self, block: Block) -> None:
        """Translate here what a nested block uses from outside, so that later operations can use it too."""
        for name in {*_names_used(block.operations), *block.outputs}:
            if name in self._producer and name not in self._values:
                self.translate(self._producer[name])

    # Errors and facts

    def unsupported(self, operation: Operation, reason: str = "") -> UnsupportedOperationError:
        """The error that names package, function, operation and what about it is not supported."""
        detail = f" in this form ({reason})" if reason else ""
        return UnsupportedOperationError(
            f"{self.package}: the portable runtime cannot run the operation {operation.type} "
            f"({operation.name!r} in function {self.function.name!r}){detail}. "
            "Run the package with Core ML on a Mac, or export it without this operation."
        )

    def element_type(self, kind: TensorType, name: str) -> int:
        """The ONNX element type of a run-time value."""
        if kind.dtype not in ELEMENT_TYPES:
            raise UnsupportedOperationError(
                f"{self.package}: {name!r} in function {self.function.name!r} has the type {kind.dtype}, "
                "which the portable runtime cannot pass at run time."
            )
        return ELEMENT_TYPES[kind.dtype]


def constant_recipe(constant: Constant) -> WeightRecipe:
    """The recipe of a constant's run-time form."""
    dtype = constant.type.dtype
    kind = "float32" if dtype.startswith(("float", "bfloat")) else "bool" if dtype == "bool" else "int32"
    return WeightRecipe("convert", (Source.of(constant),), kind, constant.type.shape, (("dtype", kind),))


def _reads_file(recipe: WeightRecipe) -> bool:
    return any(
        _reads_file(argument)
        if isinstance(argument, WeightRecipe)
        else argument is not None and argument.blob is not None
        for argument in recipe.arguments
    )


def _names_used(operations: Sequence[Operation]) -> list[str]:
    found: list[str] = []
    for operation in operations:
        found.extend(item for bound in operation.inputs.values() for item in bound if isinstance(item, str))
        for block in operation.blocks:
            found.extend(_names_used(block.operations))
            found.extend(block.outputs)
    return found


__all__ = ["Claim", "Context"]
