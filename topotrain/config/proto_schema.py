"""The messages of job.proto, read from its compiled form when a job is first read.

`job.proto` is the single source of names, numbers and types. `make proto` compiles it to `job.binpb`, and a test
compares both. The descriptor pool is private, so it cannot clash with another library's.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILE = Path(__file__).with_name("job.proto")


@cache
def schema() -> descriptor_pb2.FileDescriptorProto:
    """Return the description of job.proto."""
    # The compiled form, because protobuf's runtime has no parser of .proto files.
    return descriptor_pb2.FileDescriptorSet.FromString(FILE.with_suffix(".binpb").read_bytes()).file[0]


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """Return the descriptors of job.proto alone."""
    made = descriptor_pool.DescriptorPool()
    made.Add(schema())
    return made


def new(name: str) -> Any:
    """Return an empty message; typed Any, because its class is made at run time."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(f"topotrain.{name}"))()


def repeated(field: Any) -> bool:
    """Whether a field (its descriptor) is repeated."""
    # protobuf renamed this in 2025 and warns about the old attribute.
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)
