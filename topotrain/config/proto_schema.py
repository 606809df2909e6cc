"""Make protobuf descriptors from job.proto, when a job is first read.

`job.proto` is the single source of names, numbers and types. There is no generated module to go stale. The descriptor
pool is private, so it cannot clash with another library's.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILE = Path(__file__).with_name("job.proto")

_WORD = re.compile(r'//[^\n]*|"(?:\\.|[^"\\])*"|[\w.+-]+|[^\s\w]')
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "double": _Field.TYPE_DOUBLE,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
}
_LABELS = {"optional": _Field.LABEL_OPTIONAL, "required": _Field.LABEL_REQUIRED, "repeated": _Field.LABEL_REPEATED}


def read_proto(text: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a proto2 text.

    It may use what job.proto uses: messages, nested enums, and fields with a default.
    """
    tokens = [word for word in _WORD.findall(text) if not word.startswith("//")]
    file = descriptor_pb2.FileDescriptorProto(name=FILE.name, syntax="proto2")
    while tokens:
        word = tokens.pop(0)
        if word == "syntax":
            _expect(tokens, "=", '"proto2"', ";")
        elif word == "package":
            file.package = tokens.pop(0)
            _expect(tokens, ";")
        elif word == "enum":
            _read_enum(tokens, file.enum_type.add())
        else:
            _expect([word], "message")
            _read_message(tokens, file.message_type.add())
    enums = {e.name: f".{file.package}.{e.name}" for e in file.enum_type}
    for message in file.message_type:
        enums |= {f"{message.name}.{e.name}": f".{file.package}.{message.name}.{e.name}" for e in message.enum_type}
    for message in file.message_type:
        nested = {e.name: f".{file.package}.{message.name}.{e.name}" for e in message.enum_type}
        for field in message.field:
            if field.type_name:
                enum = (enums | nested).get(field.type_name)
                field.type = _Field.TYPE_ENUM if enum else _Field.TYPE_MESSAGE
                field.type_name = enum or f".{file.package}.{field.type_name}"
    return file


def _expect(tokens: list[str], *words: str) -> None:
    for word in words:
        found = tokens.pop(0)
        if found != word:
            raise AssertionError(f"{FILE.name}: {word!r} expected, {found!r} found")


def _read_enum(tokens: list[str], enum: descriptor_pb2.EnumDescriptorProto) -> None:
    enum.name = tokens.pop(0)
    _expect(tokens, "{")
    while (name := tokens.pop(0)) != "}":
        _expect(tokens, "=")
        enum.value.add(name=name, number=int(tokens.pop(0)))
        _expect(tokens, ";")


def _read_message(tokens: list[str], message: descriptor_pb2.DescriptorProto) -> None:
    message.name = tokens.pop(0)
    _expect(tokens, "{")
    while (word := tokens.pop(0)) != "}":
        if word == "enum":
            _read_enum(tokens, message.enum_type.add())
            continue
        kind, name, _, number = tokens[:4]
        del tokens[:4]
        field = message.field.add(name=name, number=int(number), label=_LABELS[word])
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type_name = kind
        if tokens[0] == "[":
            _expect(tokens, "[", "default", "=")
            field.default_value = tokens.pop(0).strip('"')
            _expect(tokens, "]")
        _expect(tokens, ";")


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptors of job.proto alone."""
    made = descriptor_pool.DescriptorPool()
    made.Add(read_proto(FILE.read_text(encoding="utf-8")))
    return made


def new(name: str) -> Any:
    """Return an empty message; typed Any, because its class is made at run time."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"topotrain.{name}"))()


def repeated(field: Any) -> bool:
    """Whether a field (its descriptor) is repeated."""
    # protobuf renamed this in 2025 and warns about the old attribute.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)
