"""Messages and their bytes: whole or refused."""

import re
import struct
import zlib
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_frames import PACKAGE, every_message
from seeds import examples

from topotrain.core import protocol as m
from topotrain.core.optim.adapter import hyper
from topotrain.training.data.data_messages import DrawnBatches

KINDS = [cls.KIND for cls in every_message()]
_VALUES = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=50),
    bytes: st.binary(max_size=50),
}
_INTS = st.lists(_VALUES[int], max_size=10).map(tuple)


@st.composite
def messages(draw):
    cls = m.KINDS[draw(st.sampled_from(KINDS))]
    return cls(**{f.name: draw(_VALUES.get(f.type, _INTS)) for f in fields(cls) if f.name != "body"})


@given(messages())
def test_every_message_survives_its_bytes(message):
    kind, meta = m.encode(message)
    assert kind == type(message).KIND
    assert m.decode(kind, meta) == message


@given(st.sampled_from(KINDS), st.binary(max_size=300))
@settings(max_examples=examples(300))
def test_random_bytes_are_a_message_or_refused(kind, meta):
    try:
        message = m.decode(kind, meta)
    except m.ProtocolError:
        return
    assert len(m.encode(message)[1]) == len(meta)


@given(messages(), st.data())
def test_a_shortened_or_lengthened_message_is_refused(message, data):
    kind, meta = m.encode(message)
    if meta:
        with pytest.raises(m.ProtocolError):
            m.decode(kind, meta[: data.draw(st.integers(0, len(meta) - 1))])
    with pytest.raises(m.ProtocolError, match="too many"):
        m.decode(kind, meta + b"x")


PART, DRAWN = m.SchemaPart(part=0, parts=1, text="x"), DrawnBatches(0, 0, end=True, sizes=(), indices=())


@pytest.mark.parametrize(
    ("message", "damaged", "words"),
    [
        (PART, lambda meta: meta[:-5] + struct.pack("<I", 2**32 - 1) + b"x", "cut short"),
        (PART, lambda meta: meta[:-1] + b"\xff", "UTF-8"),
        (DRAWN, lambda meta: meta[:-8] + struct.pack("<I", 3) + b"abc" + meta[-4:], "list of integers"),
    ],
)
def test_the_length_of_a_field_and_its_content_are_not_believed(message, damaged, words):
    kind, meta = m.encode(message)
    with pytest.raises(m.ProtocolError, match=words):
        m.decode(kind, damaged(meta))


def test_messages_without_a_number_and_of_too_many_bytes_are_refused():
    @dataclass(frozen=True, slots=True)
    class Unregistered(m.Message):
        round: int

    with pytest.raises(m.ProtocolError, match="unknown message type 9999"):
        m.decode(9999, b"")
    with pytest.raises(m.ProtocolError, match="Unregistered is not a registered message"):
        m.encode(Unregistered(1))
    with pytest.raises(m.ProtocolError, match="limit is 65536"):
        m.encode(m.SchemaPart(part=0, parts=1, text="x" * m.MAX_META))


def test_the_body_is_no_part_of_the_fields():
    body = torch.ones(3)
    with_body = m.Values(round=1, bucket=2, version=3, body=body)
    assert m.encode(with_body) == m.encode(m.Values(round=1, bucket=2, version=3))
    assert m.decode(*m.encode(with_body), body).body is body


NUMBERS = {
    1: "SchemaPart Init Fetch Values Fail SharedBuffer StepRates MeanRequest",
    10: "Push BackwardEnd ReducedGradient GradientOverride Commit Applied Finish BackwardReduced GroupIdle LoopExited",
    20: "StepVote StepDecision StepDecisionRequest WorkerRejoined RestartRequest AppliedBatchesOfStreams",
    26: "AppliedBatchesRequest AppliedBatchesReply GroupLeaveRequest GroupLeft Delta MasterValue PairOffer PairReply",
    34: "Drained FinalValue StepMissed StepCatchUp StepCaughtUp PairTaken",
    40: "ModelBufferValue FinalRequest BufferRequest LastWrites",
    44: "StepAborted GroupEpochRequest GroupEpoch JoinRequest Joined JoinBackward",
    50: "LeaseRequest Lease LeaseRelease DrawnBatches DrawRequest PassBegun",
    60: "StateRequest StatePart WorkerStatePart WorkerStateRequest SnapshotRequest SnapshotPart Remainder",
    70: "CollectivePart",
    80: "TableOpen TablePush TableStep TablePull TableRows TableAssign TableRule TableStatsRequest TableStats",
    89: "TableBarrier TablesFinished TableList TableIds",
    96: "Activation ActivationHello",
    100: "ResumeConnection Ack ReplicatedEvent ReplicaAck StateTransfer ReplicaReleased ReplicaChecksum",
    110: "UnitPart",
    120: "Assignment AssignedBucket AssignedElements",
    130: "HostHello HostReady HostSumStart HostGradient HostBackwardEnd HostCommit HostPush HostStepEnd",
    138: "SeparateGradients HostMean HostValues",
    150: "PeerHello PeerGradient PeerBackwardEnd PeerMean PeerPause",
    156: "WindowOver ExchangeTime StepTime NextRound InnerStateRequest InnerStatePart DonorSilent",
    170: "WorkerValue AwaitedCall PassedCall CopySums",
}


def test_numbers_on_the_wire_never_change():
    expected = {first + n: name for first, names in NUMBERS.items() for n, name in enumerate(names.split())}
    assert {cls.KIND: cls.__name__ for cls in every_message()} == expected


def test_a_number_that_another_message_has_is_refused_by_name():
    with pytest.raises(ValueError, match=r"message number 3 of .*Second belongs to .*step_messages\.Fetch"):

        @m.message(3)
        @dataclass(frozen=True, slots=True)
        class Second(m.Message):
            pass

    assert m.kind_of(3) is m.Fetch


def test_only_modules_of_messages_register_some():
    """So that the walk over these modules finds all messages."""
    found = {path.name for path in PACKAGE.rglob("*.py") if re.search(r"^@message\(", path.read_text(), re.MULTILINE)}
    assert found and all(name.endswith("_messages.py") for name in found)


def commit_of(groups):
    """The commit of a script with so many parameter groups, each with a rate of its own."""
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1 / (1 + n)} for n in range(groups)]
    empty = {int: 0, float: 0.0, bool: False, bytes: b""}
    settings = {f.name: empty.get(f.type, ()) for f in fields(m.Commit) if f.name != "body"}
    return m.Commit(**settings | {"hyper": hyper(torch.optim.AdamW(parameters))})


@pytest.mark.parametrize("groups", [1, 340])
def test_the_settings_of_many_parameter_groups_fit_into_a_commit(groups):
    commit = commit_of(groups)
    assert m.decode(*m.encode(commit)) == commit


def test_deflated_bytes_are_bounded_and_whole():
    deflate = 1 << 31
    for raw in (zlib.compress(bytes(1 << 23)), zlib.compress(bytes(10)), zlib.compress(bytes(1 << 17))[:-1], b"x" * 9):
        whole = m.encode(commit_of(1))[1]
        hyper_text = commit_of(1).hyper
        at = whole.index(hyper_text)
        meta = whole[: at - 4] + struct.pack("<I", len(raw) | deflate) + raw + whole[at + len(hyper_text) :]
        with pytest.raises(m.ProtocolError, match="deflated"):
            m.decode(m.Commit.KIND, meta)
