"""The protobuf messages of a Core ML model that this project reads, built at import from one table.

Only the fields that are used are listed (protobuf skips the others). The messages live in a descriptor pool
of their own, so they never collide with coremltools' generated classes in the same process, and no generated
code ties the project to one protobuf release.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "llm_gemma_coreml.mil"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _FIELD.TYPE_DOUBLE,
    "float": _FIELD.TYPE_FLOAT,
    "int64": _FIELD.TYPE_INT64,
    "uint64": _FIELD.TYPE_UINT64,
    "int32": _FIELD.TYPE_INT32,
    "bool": _FIELD.TYPE_BOOL,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}

# message -> lines "number name [modifier] type"; modifiers: "repeated", "map" (string keys), "oneof:group".
_MESSAGES: dict[str, str] = {
    "Model": """
        1 specificationVersion int32
        2 description ModelDescription
        502 mlProgram Program""",
    "ModelDescription": """
        20 functions repeated FunctionDescription
        21 defaultFunctionName string""",
    "FunctionDescription": """
        1 name string""",
    "Program": """
        1 version int64
        2 functions map Function""",
    "Function": """
        1 inputs repeated NamedValueType
        2 opset string
        3 block_specializations map Block""",
    "Block": """
        1 inputs repeated NamedValueType
        2 outputs repeated string
        3 operations repeated Operation""",
    "Operation": """
        1 type string
        2 inputs map Argument
        3 outputs repeated NamedValueType
        4 blocks repeated Block
        5 attributes map Value""",
    "Argument": """
        1 arguments repeated Binding""",
    "Binding": """
        1 name oneof:binding string
        2 value oneof:binding Value""",
    "NamedValueType": """
        1 name string
        2 type ValueType""",
    "ValueType": """
        1 tensorType oneof:type TensorType
        2 listType oneof:type Opaque
        3 tupleType oneof:type Opaque
        4 dictionaryType oneof:type Opaque
        5 stateType oneof:type StateType""",
    "Opaque": "",
    "StateType": """
        1 wrappedType ValueType""",
    "TensorType": """
        1 dataType int32
        2 rank int64
        3 dimensions repeated Dimension""",
    "Dimension": """
        1 constant oneof:dimension ConstantDimension
        2 unknown oneof:dimension UnknownDimension""",
    "ConstantDimension": """
        1 size uint64""",
    "UnknownDimension": """
        1 variadic bool""",
    "Value": """
        2 type ValueType
        3 immediateValue oneof:value ImmediateValue
        5 blobFileValue oneof:value BlobFileValue""",
    "ImmediateValue": """
        1 tensor oneof:value TensorValue
        2 tuple oneof:value Opaque
        3 list oneof:value Opaque
        4 dictionary oneof:value Opaque""",
    "BlobFileValue": """
        1 fileName string
        2 offset uint64""",
    "TensorValue": """
        1 floats oneof:value RepeatedFloats
        2 ints oneof:value RepeatedInts
        3 bools oneof:value RepeatedBools
        4 strings oneof:value RepeatedStrings
        5 longInts oneof:value RepeatedLongInts
        6 doubles oneof:value RepeatedDoubles
        7 bytes oneof:value RepeatedBytes""",
    "RepeatedFloats": "1 values repeated float",
    "RepeatedInts": "1 values repeated int32",
    "RepeatedBools": "1 values repeated bool",
    "RepeatedStrings": "1 values repeated string",
    "RepeatedLongInts": "1 values repeated int64",
    "RepeatedDoubles": "1 values repeated double",
    "RepeatedBytes": "1 values bytes",
}

DATA_TYPES: dict[int, str] = {
    1: "bool",
    2: "string",
    10: "float16",
    11: "float32",
    12: "float64",
    13: "bfloat16",
    21: "int8",
    22: "int16",
    23: "int32",
    24: "int64",
    25: "int4",
    31: "uint8",
    32: "uint16",
    33: "uint32",
    34: "uint64",
    35: "uint4",
    36: "uint2",
    37: "uint1",
    38: "uint6",
    39: "uint3",
    40: "float8_e4m3fn",
    41: "float8_e5m2",
}
"""Name of each element type of the specification."""


def _set_type(field: Any, type_name: str) -> None:
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
    else:
        field.type = _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{type_name}"


def _add_map_entry(message: Any, field: Any, type_name: str) -> None:
    """Make `field` a map from strings to `type_name`, in protobuf a repeated nested entry message."""
    entry = message.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    for number, name, value_type in ((1, "key", "string"), (2, "value", type_name)):
        part = entry.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
        _set_type(part, value_type)
    field.label = _FIELD.LABEL_REPEATED
    field.type = _FIELD.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _add_field(message: Any, line: str) -> None:
    number, name, *modifiers, type_name = line.split()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    modifier = modifiers[0] if modifiers else ""
    if modifier == "map":
        _add_map_entry(message, field, type_name)
        return
    _set_type(field, type_name)
    if modifier == "repeated":
        field.label = _FIELD.LABEL_REPEATED
    elif modifier:
        group = modifier.removeprefix("oneof:")
        if not any(existing.name == group for existing in message.oneof_decl):
            message.oneof_decl.add(name=group)
        field.oneof_index = 0  # no message of this table has two groups


def _build_model_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for message_name, lines in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for line in filter(None, map(str.strip, lines.splitlines())):
            _add_field(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))


Model: Any = _build_model_class()
"""The message class of `model.mlmodel`."""
