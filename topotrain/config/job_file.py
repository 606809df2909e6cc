"""Convert between a job file or a dict and a `Job`.

Every form of a job (protobuf text format, YAML, a dict, an override) first becomes a message of `job.proto`. So all of
them accept and refuse the same.
"""

import bisect
import difflib
import importlib
import keyword
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from topotrain.config import job as words
from topotrain.config.job import Cluster, ConfigError, Job
from topotrain.config.private_files import read_text
from topotrain.config.proto_schema import FILE, new, pool, repeated
from topotrain.config.singa_layers import DividedLayer, divided_in_data, divided_in_text, warning

_Places = dict[str, tuple[int, int]]  # path of a field -> line and column of its first mention, from 1
_NET = "neuralnet"
_YAML_NODES = 10_000


@dataclass(frozen=True, slots=True)
class _Read:
    """Places of fields, and layers that SINGA would divide, beside a message."""

    places: _Places
    divided: tuple[DividedLayer, ...]


def load(path: str | Path, overrides: Sequence[str] = (), program: str | None = None, args: Sequence[str] = ()) -> Job:
    """Load the job of a .conf (protobuf text format), .yaml or .yml file.

    `overrides` are "cluster.nworker_groups=3" and the like; `program`, if given, replaces the file's program and args.
    Raises ConfigError, with the place as "file:line:column" where there is one.
    """
    return load_with_warnings(path, overrides, program, args)[0]


def load_with_warnings(
    path: str | Path, overrides: Sequence[str] = (), program: str | None = None, args: Sequence[str] = ()
) -> tuple[Job, list[str]]:
    """Load a job, and return warnings for the user with it."""
    readers = {".conf": _read_text, ".yaml": _read_yaml, ".yml": _read_yaml}
    reader = readers.get(Path(path).suffix)
    if reader is None:
        raise ConfigError("job file", str(path), "must end in .conf, .yaml or .yml")
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError("job file", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("job file", str(path), f"must be UTF-8 text, and is not from byte {error.start} on") from None
    job, told = _job(text, str(path), reader, overrides)
    return (job if program is None else replace(job, program=program, args=tuple(args))), told


def loads(text: str, source: str = "<string>", overrides: Sequence[str] = ()) -> Job:
    """Return the job of a protobuf text; errors name `source` as its place."""
    return _job(text, source, _read_text, overrides)[0]


def from_data(data: Mapping[str, Any], source: str = "the job") -> Job:
    """Return the job of a dictionary with its fields; errors name `source`."""
    return _job(data, source, _read_dict, ())[0]


def dumps(job: Job) -> str:
    """Return the job as protobuf text without defaults; loads(dumps(job)) == job."""
    message = new("JobProto")
    _to_message(job, message)
    return str(text_format.MessageToString(message, as_utf8=True))


def dumps_cluster(cluster: Cluster) -> str:
    """Return a cluster block as protobuf text without defaults."""
    # Not that of a job: with the defaults of a job some blocks are refused.
    message = new("JobProto")
    _to_message(cluster, message.cluster)
    return str(text_format.MessageToString(message, as_utf8=True))


def _job(
    data: Any, source: str, reader: Callable[[Any, str, Any], _Read], overrides: Sequence[str]
) -> tuple[Job, list[str]]:
    message = new("JobProto")
    read = reader(data, source, message)
    # After the file. An error in one of these fields is then that of the override, and not of a line in the file.
    overridden = {_override(message, override): f"override {override!r}" for override in overrides}
    unused: list[str] = []
    try:
        job: Job = _from_message(message, "", unused)
    except ConfigError as error:
        raise error.at(overridden.get(error.field) or _place(source, _find(read.places, error.field))) from None
    return job, list(_warnings(job, source, unused, read.divided))


def _warnings(job: Job, source: str, unused: Sequence[str], divided: tuple[DividedLayer, ...]) -> Iterator[str]:
    if unused:
        yield f"{source}: {', '.join(unused)} have no effect here: the model is the program's PyTorch module"
    workers = job.cluster.nworkers_per_group
    if divided and workers > 1 and not job.splits:
        yield f"{source}: {warning(divided, workers)}"
    if job.cluster.nserver_groups == 0 and job.cluster.nworker_groups > 1:
        yield (
            f"{source}: nserver_groups = 0 leaves {job.cluster.nworker_groups} worker groups that never exchange "
            "values; only group 0 is saved"
        )


def _find(places: _Places, path: str) -> tuple[int, int] | None:
    """Return the place of a field, or of the block that it is missing from."""
    # `places` has a repeated field once, where it is mentioned first.
    path = re.sub(r"\[\d+\]", "", path)
    while path and path not in places:
        path = path.rpartition(".")[0]
    return places.get(path)


def _place(source: str, at: tuple[int, int] | None) -> str:
    return source if at is None else f"{source}:{at[0]}:{at[1]}"


# ---- message <-> dataclass -------------------------------------------------------------------------------------------


def _attribute(name: str) -> str:
    # The field `import` is a Python keyword.
    return f"{name}_" if keyword.iskeyword(name) else name


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _from_message(message: Any, path: str, unused: list[str]) -> Any:
    # A dataclass has the name of its message.
    cls = getattr(words, message.DESCRIPTOR.name.removesuffix("Proto"))
    known = {f.name: f for f in fields(cls)}
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        inner, attribute = _join(path, field.name), _attribute(field.name)
        # A field of SINGA that a PyTorch module makes unnecessary.
        if attribute not in known:
            unused.append(inner)
        elif repeated(field):
            values[attribute] = tuple(_value(field, item, inner, unused) for item in value)
        else:
            values[attribute] = _value(field, value, inner, unused)
    for name, f in known.items():
        # Here and not in the parser, which would not name the path of the block.
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(_join(path, name), None, "is required")
    try:
        return cls(**values)
    except ConfigError as error:
        # A block may occur in several places, such as an optimizer, and its class has the path of one.
        inside = error.field.startswith(f"{cls.PATH}.")
        raise (error.renamed(path + error.field[len(cls.PATH) :]) if cls.PATH and inside else error) from None


def _value(field: Any, value: Any, path: str, unused: list[str]) -> Any:
    if field.message_type is not None:
        return _from_message(value, path, unused)
    # The name, which the rule of the field turns into the enum of `job`.
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value


def _to_message(value: Any, message: Any) -> None:
    for f in fields(value):
        inner = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if inner == default:
            continue
        # Without the underscore of a keyword.
        field = message.DESCRIPTOR.fields_by_name[f.name.rstrip("_")]
        _put(message, field, list(inner) if repeated(field) else [inner])


def _put(message: Any, field: Any, values: Sequence[Any]) -> None:
    for value in values:
        if field.message_type is not None:
            _to_message(value, _slot(message, field))
            continue
        plain = field.enum_type.values_by_name[value].number if field.enum_type is not None else value
        if repeated(field):
            getattr(message, field.name).append(plain)
        else:
            setattr(message, field.name, plain)


def _slot(message: Any, field: Any) -> Any:
    """Return the inner message for a value of `field`."""
    slot = getattr(message, field.name).add() if repeated(field) else getattr(message, field.name)
    # A block without fields is present, too, and means its defaults.
    slot.SetInParent()
    return slot


# ---- errors ----------------------------------------------------------------------------------------------------------


def _unknown(path: str, name: str, descriptor: Any) -> ConfigError:
    known = list(descriptor.fields_by_name)
    homes = [
        m.name for m in pool().FindFileByName(FILE.name).message_types_by_name.values() if name in m.fields_by_name
    ]
    if homes:
        hint = f"it is a field of {', '.join(homes)}"
    elif close := difflib.get_close_matches(name, known, 1):
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"known are {', '.join(known)}"
    return ConfigError(path, None, f"{descriptor.name} has no such field; {hint}")


# The messages of text_format. If another version of protobuf has others, the error is its own message.
_NO_FIELD = re.compile(r'Message type "topotrain\.(\w+)" has no field named "([^"]*)"')
_NO_VALUE = re.compile(r'Enum type "([\w.]+)" has no value named (\w+)')
_PREFIX = re.compile(r"^\d+:\d+ : ('.*': )?")  # place and line, which text_format repeats in its messages


def _parse_error(error: text_format.ParseError, source: str, places: _Places) -> ConfigError:
    line, column = error.GetLine(), error.GetColumn()
    at = None if line is None or column is None else (line, column)
    # The parser's message does not name the path, so it is that of the last field before the place.
    before = [(place, path) for path, place in places.items() if at is not None and place <= at]
    path = max(before)[1] if before else ""
    if found := _NO_FIELD.search(str(error)):
        kind, name = found.groups()
        wrong = _unknown(path or name, name, new(kind).DESCRIPTOR)
    elif found := _NO_VALUE.search(str(error)):
        names = ", ".join(pool().FindEnumTypeByName(found[1]).values_by_name)
        wrong = ConfigError(path, found[2], f"must be one of {names}")
    else:
        wrong = ConfigError(path, None, _PREFIX.sub("", str(error)).replace("topotrain.", ""))
    return wrong.at(_place(source, at))


# ---- protobuf text ---------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<quote>["'])"""
    r"|(?P<name>[A-Za-z_]\w*)|(?P<open>[{<])|(?P<close>[}>])|(?P<other>[^\s])"
)


def _read_text(text: str, source: str, message: Any) -> _Read:
    text, places, divided = _scan(text, source, message.DESCRIPTOR)
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise _parse_error(error, source, places) from None
    return _Read(places, divided)


def _scan(text: str, source: str, top: Any) -> tuple[str, _Places, tuple[DividedLayer, ...]]:
    """Check braces, find the places of fields, and blank the inside of skipped blocks.

    A block is skipped if SINGA describes its fields and job.proto does not.
    """
    lines = [0] + [m.end() for m in re.finditer("\n", text)]
    # Blocks that job.proto declares without fields, such as neuralnet.
    read_over = {f.name for f in top.fields if f.message_type is not None and not f.message_type.fields}
    stack: list[tuple[str, re.Match[str]]] = []
    places: _Places = {}
    name = last = ""

    def at(match: re.Match[str]) -> tuple[int, int]:
        line = bisect.bisect_right(lines, match.start())
        return line, match.start() - lines[line - 1] + 1

    def wrong(match: re.Match[str], accepted: str) -> ConfigError:
        return ConfigError("", None, accepted, _place(source, at(match)))

    blanks: list[tuple[int, int]] = []
    divided: tuple[DividedLayer, ...] = ()
    for match in _TOKEN.finditer(text):
        token = match.group()
        # Comments and texts are tokens, so that braces inside them do not count.
        if match.lastgroup == "comment":
            continue
        if match.lastgroup == "quote":
            raise wrong(match, f"a text that is opened by {token} and not closed on its line")
        # A name after a colon is a value, not a field, and one right behind a digit an exponent, as in 1e-8.
        exponent = match.lastgroup == "name" and text[match.start() - 1 : match.start()] in (*string.digits, ".")
        if match.lastgroup == "name" and last != ":" and not exponent:
            name = token
            # The first mention of a repeated field. The parser refuses a second one of any other.
            places.setdefault(".".join([*(outer for outer, _ in stack), name]), at(match))
        elif match.lastgroup == "open":
            stack.append((name, match))
        elif match.lastgroup == "close":
            if not stack:
                raise wrong(match, f"unbalanced braces: {token} closes nothing")
            block, opened = stack.pop()
            if opened.group() + token not in ("{}", "<>"):
                line, column = at(opened)
                raise wrong(match, f"unbalanced braces: {token} closes the {opened.group()} of {line}:{column}")
            # Only at the top of a file, where SINGA has these blocks.
            if not stack and block in read_over:
                blanks.append((opened.end(), match.start()))
                if block == _NET:
                    divided = divided_in_text(text[opened.end() : match.start()])
        last = token
    if stack:
        block, opened = stack[-1]
        raise wrong(opened, f"unbalanced braces: the {opened.group()} of {block or 'this block'} is never closed")
    # Every line and column stays, so that the errors of the real parser still point at the user's text.
    for start, end in blanks:
        text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text, places, divided


def _override(message: Any, override: str) -> str:
    """Apply an override "path=value", and return the path."""
    path, equals, value = override.partition("=")
    where = f"override {override!r}"
    path = path.strip()
    *outer, name = path.split(".")
    if not equals:
        raise ConfigError("", None, "must be FIELD=VALUE, such as cluster.nworker_groups=3", where)
    # Blocks on the way are made, where the file does not have them.
    for depth, part in enumerate(outer):
        field = _field(message, part, ".".join(outer[: depth + 1]), where)
        if field.message_type is None or repeated(field):
            raise ConfigError(".".join(outer[: depth + 1]), None, "has no single fields inside", where)
        message = _slot(message, field)
    field = _field(message, name, path, where)
    # A shell has removed the quotes.
    if field.type == field.TYPE_STRING and value[:1] not in ("'", '"', "["):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    parsed = type(message)()
    try:
        text_format.Parse(f"{name}: {value}", parsed)
    except text_format.ParseError as error:
        raise _parse_error(error, where, {path: (1, 1)}).at(where) from None
    # The value could end in another field: cluster.n_push=1 n_fetch: 2.
    if [f.name for f, _ in parsed.ListFields()] not in ([name], []):
        raise ConfigError(path, value, "must be one value", where)
    # An override replaces a repeated field, and does not append to it.
    message.ClearField(name)
    message.MergeFrom(parsed)
    return path


def _field(message: Any, name: str, path: str, where: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        raise _unknown(path, name, message.DESCRIPTOR).at(where)
    return field


# ---- dicts and YAML --------------------------------------------------------------------------------------------------


def _read_dict(data: Any, source: str, message: Any) -> _Read:
    _fill(message, data, "")
    return _Read({}, divided_in_data(data.get(_NET)))


def _read_yaml(text: str, source: str, message: Any) -> _Read:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise ConfigError("job file", source, 'needs PyYAML: pip install "topotrain[yaml]"') from None
    places: _Places = {}
    try:
        # Composed for the places and loaded for the values, because values do not know their lines.
        root = yaml.compose(text, yaml.SafeLoader)
        _yaml_places(root, "", places, iter(range(_YAML_NODES)))
        read = _read_dict(yaml.safe_load(text) or {}, source, message)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = None if mark is None else (mark.line + 1, mark.column + 1)
        raise ConfigError("", None, f"not valid YAML: {error.problem}", _place(source, at)) from None
    except RecursionError:
        raise ConfigError("", None, "nested too deep", source) from None
    except ConfigError as error:
        raise error.at(_place(source, _find(places, error.field))) from None
    return _Read(places, read.divided)


def _yaml_places(node: Any, path: str, places: _Places, left: Iterator[int]) -> None:
    # An alias is followed wherever it stands, so a short text can have very many nodes.
    if next(left, None) is None:
        raise ConfigError("", None, f"has more than {_YAML_NODES:,} values, aliases included")
    if node is None or node.id == "scalar":
        return
    if node.id == "sequence":
        for item in node.value:
            _yaml_places(item, path + "[]", places, left)
        return
    # YAML takes the last of two equal keys without an error.
    seen = set()
    for key, value in node.value:
        inner = _join(path, str(key.value))
        places[inner] = (key.start_mark.line + 1, key.start_mark.column + 1)
        if inner in seen:
            raise ConfigError(inner, None, "is given twice")
        seen.add(inner)
        _yaml_places(value, inner, places, left)


def _fill(message: Any, data: Any, path: str) -> None:
    if not isinstance(data, Mapping):
        raise ConfigError(path, data, "must be a mapping from field to value")
    for name, value in data.items():
        inner = _join(path, str(name))
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            raise _unknown(inner, str(name), message.DESCRIPTOR)
        # YAML gives None for a field without a value.
        if value is None:
            continue
        many = repeated(field)
        # A single value stands for a list of one, as in protobuf text.
        for item in value if many and isinstance(value, list | tuple) else [value]:
            if field.message_type is None:
                _set(message, field, item, inner)
            else:
                slot = _slot(message, field)
                # A block that job.proto declares without fields is skipped, as in `_scan`.
                if slot.DESCRIPTOR.fields:
                    _fill(slot, item, inner)


def _set(message: Any, field: Any, value: Any, path: str) -> None:
    plain = _scalar(field, value, path)
    try:
        if repeated(field):
            getattr(message, field.name).append(plain)
        else:
            setattr(message, field.name, plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(path, value, f"cannot be: {error}") from None


def _scalar(field: Any, value: Any, path: str) -> Any:
    if field.enum_type is not None:
        found = field.enum_type.values_by_name.get(value.value if isinstance(value, Enum) else value)
        if found is None:
            raise ConfigError(path, value, f"must be one of {', '.join(field.enum_type.values_by_name)}")
        return found.number
    kinds: dict[int, tuple[type | tuple[type, ...], str]] = {
        field.TYPE_BOOL: (bool, "true or false"),
        field.TYPE_STRING: (str, "a text"),
        field.TYPE_DOUBLE: ((int, float), "a number"),
    }
    kind, accepted = kinds.get(field.type, (int, "a whole number"))
    if field.type == field.TYPE_DOUBLE and isinstance(value, str):
        # YAML 1.1 reads 1e-3, without a point, as a text.
        value = _number(value)
    # To isinstance a bool is an int, too.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(path, value, f"must be {accepted}")
    return value


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
