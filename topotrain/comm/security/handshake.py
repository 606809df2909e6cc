"""A handshake in which both sides prove that they know the job's token.

Until the proof is there a peer gets fixed-size fields, at most 512 bytes each way, and two seconds in all. No number
that it sends reaches an allocator. There are four messages:

    dialer  HELLO      versions, job, own address, wanted address, incarnation, generation, lane, nonce
    answer  CHALLENGE  version, incarnation, generation, nonce, proof over all of it
    dialer  PROOF      proof over all of it, config digest
    answer  WELCOME    proof over all of it                              (or REFUSE: code, text, at any of its turns)

The answering side proves itself first. Each proof is HMAC-SHA256 with a key for the side and the role of the prover,
derived from the token as in HKDF (RFC 5869). So a proof cannot be sent back to its author, and a worker's proof cannot
be used as a server's.

Under TLS every proof also covers the certificate that its author has seen (the binding, see `tls`). A process in
between must have shown another certificate, so proofs that it relays are worthless.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Container
from contextlib import suppress
from dataclasses import astuple, dataclass

from topotrain.comm.transport import ConnectionLost, Refused, TransportError
from topotrain.comm.transport.multi_socket import HandshakeSocket
from topotrain.config.plain_text import printable
from topotrain.config.topology import Address, Role

TOKEN_BYTES = 32
MAX_LANES = 16
VERSIONS = (1, 1)  # lowest and highest supported version of handshake and frames
CODES = ("VERSION", "JOB", "CONFIG", "AUTH", "FENCED", "FULL", "TWICE")
DEADLINE = 2.0  # seconds for a whole handshake
BUDGET = 512  # bytes each way for a whole handshake

MAGIC = b"ttHS"
_PREFIX = struct.Struct("<4sBH")  # magic, kind, length of what follows
_HELLO = struct.Struct("<BB32sBqqBqqqqBB16s32s")
_CHALLENGE = struct.Struct("<Bqq32s")
_MAC_BYTES = 32
_DIGEST_BYTES = 64
# A refusal must fit into the dialer's BUDGET after the CHALLENGE that it has read.
_TEXT_BYTES = 320
_KIND_HELLO, _KIND_CHALLENGE, _KIND_PROOF, _KIND_WELCOME, _KIND_REFUSE = range(1, 6)


class NotOurProtocol(TransportError):
    """A peer that does not speak this handshake: garbage, silence, or too slow."""


class HandshakeTimeout(NotOurProtocol, ConnectionLost):
    """The handshake ran out of time, as peers of one job may on a loaded machine."""


class HandshakeAborted(NotOurProtocol, ConnectionLost):
    """The other side closed the connection during the handshake."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The claims of one process about itself, and the secret of its job.

    token: 32 random bytes, known to every process of the job. incarnation: a number that no restart reuses.
    generation: the number of the membership; a peer with a lower one is refused. digest: of the config, at most 64
    ASCII characters.

    Raises:
        ValueError: a field is out of its bounds.
    """

    job_id: str
    token: bytes
    incarnation: int
    generation: int
    digest: str

    def __post_init__(self) -> None:
        if not self.job_id:
            raise ValueError("job_id = '': must not be empty")
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"token of {len(self.token)} bytes: must have {TOKEN_BYTES}")
        if not self.digest.isascii() or len(self.digest) > _DIGEST_BYTES or "\0" in self.digest:
            raise ValueError(f"digest = {self.digest!r}: must be at most {_DIGEST_BYTES} ASCII characters")
        for name, value in (("incarnation", self.incarnation), ("generation", self.generation)):
            if not 0 <= value < 1 << 63:
                raise ValueError(f"{name} = {value}: must be >= 0 and below 2**63")

    def __repr__(self) -> str:  # a token must not get into a log
        return f"Identity({self.job_id!r}, incarnation={self.incarnation}, generation={self.generation})"


@dataclass(frozen=True, slots=True)
class SocketNumber:
    """Socket `lane` of `lanes` of a connection, which share 16 bytes, the `bundle`."""

    lane: int = 0
    lanes: int = 1
    bundle: bytes = bytes(16)


ONLY = SocketNumber()


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a handshake, and the local endpoint (`me`) that it talks to."""

    me: Address
    address: Address
    incarnation: int
    generation: int
    lane: SocketNumber = ONLY


def dial(
    sock: HandshakeSocket,
    identity: Identity,
    me: Address,
    wanted: Address,
    seconds: float = DEADLINE,
    lane: SocketNumber = ONLY,
    binding: bytes = b"",
) -> Peer:
    """Introduce `me` to the endpoint `wanted` at the other end of a connected socket.

    binding: the hash of the certificate that the other end has shown (see `tls`); empty without TLS.

    Raises:
        Refused: the other side refused (with its code), or could not prove that it knows the token (AUTH), or is of an
            older generation than this side (FENCED).
        NotOurProtocol: it does not speak this handshake, or not in time (HandshakeTimeout).
    """
    turns = _Turns(sock, seconds, binding)
    nonce = secrets.token_bytes(32)
    numbers = (identity.incarnation, identity.generation)
    turns.send(_KIND_HELLO, _HELLO.pack(*VERSIONS, _job_hash(identity), *me, *wanted, *numbers, *astuple(lane), nonce))
    challenge = turns.receive(_KIND_CHALLENGE, _CHALLENGE.size, _MAC_BYTES)
    version, incarnation, generation, _ = _CHALLENGE.unpack(challenge)
    if not turns.proven(_key(identity, "answer", wanted)):
        raise Refused("AUTH", f"{wanted} could not prove that it belongs to job {identity.job_id!r}")
    # Only now: the numbers of an unproven peer are not looked at.
    if not VERSIONS[0] <= version <= VERSIONS[1]:
        raise Refused("VERSION", f"{wanted} wants protocol version {version}, we speak {_versions(*VERSIONS)}")
    if generation < identity.generation:
        raise Refused("FENCED", f"{wanted} is of generation {generation}, we are of {identity.generation}")
    # The config digest goes to a proven peer only.
    turns.send_proven(_KIND_PROOF, identity.digest.encode().ljust(_DIGEST_BYTES, b"\0"), _key(identity, "dial", me))
    turns.receive(_KIND_WELCOME, 0, _MAC_BYTES)
    if not turns.proven(_key(identity, "answer", wanted)):
        raise Refused("AUTH", f"the welcome of {wanted} carries a wrong proof")
    return Peer(me, wanted, incarnation, generation, lane)


def answer(
    sock: HandshakeSocket,
    identity: Identity,
    attached: Container[Address],
    seconds: float = DEADLINE,
    binding: bytes = b"",
) -> tuple[Peer, bytes]:
    """Answer a dialer's handshake; return the peer and the bytes of the WELCOME.

    The caller sends the WELCOME before anything else, or refuses the peer with `refuse`. attached: the addresses that a
    peer may want. binding: the hash of the certificate that this side has shown, or empty without TLS.

    Raises:
        Refused: this side refused, and has sent the reason to the dialer.
        NotOurProtocol: no handshake came, or not in time. Nothing has been sent to the dialer.
    """
    turns = _Turns(sock, seconds, binding)
    try:
        return _answer(turns, identity, attached)
    except Refused as refused:
        turns.refuse(refused)
        raise


def refuse(sock: HandshakeSocket, refused: Refused) -> None:
    """Send a refusal to the dialer, without waiting for it to read."""
    _Turns(sock, DEADLINE).refuse(refused)


def _answer(turns: "_Turns", identity: Identity, attached: Container[Address]) -> tuple[Peer, bytes]:
    fields = _HELLO.unpack(turns.receive(_KIND_HELLO, _HELLO.size, 0))
    low, high, job = fields[:3]
    version = min(high, VERSIONS[1])
    if version < max(low, VERSIONS[0]):
        known = f"you speak protocol {_versions(low, high)}, we speak {_versions(*VERSIONS)}"
        raise Refused("VERSION", f"{known}: all machines need the same topotrain")
    # `compare_digest` takes equally long whatever differs, so a stranger learns nothing from the time.
    if not hmac.compare_digest(job, _job_hash(identity)):
        raise Refused("JOB", "this process belongs to another job")
    dialer, me = _address(*fields[3:6]), _address(*fields[6:9])
    incarnation, generation = fields[9:11]
    lane = SocketNumber(*fields[11:14])
    # Before the proof is checked: these numbers must not be used at all if they are out of bounds.
    if not lane.lane < lane.lanes <= MAX_LANES:
        raise NotOurProtocol(f"no such lane: {lane.lane} of {lane.lanes}")
    body = _CHALLENGE.pack(version, identity.incarnation, identity.generation, secrets.token_bytes(32))
    key = _key(identity, "answer", me)
    turns.send_proven(_KIND_CHALLENGE, body, key)
    digest = turns.receive(_KIND_PROOF, _DIGEST_BYTES, _MAC_BYTES).rstrip(b"\0")
    if not turns.proven(_key(identity, "dial", dialer)):
        raise Refused("AUTH", f"{dialer} could not prove that it belongs to this job")
    # Only after the proof: a stranger must not learn whether configs match.
    if not hmac.compare_digest(digest, identity.digest.encode()):
        ours = identity.digest
        raise Refused(
            "CONFIG", f"the configs differ: {dialer} has {digest.decode('ascii', 'replace')}, {me} has {ours}"
        )
    if generation < identity.generation:
        raise Refused("FENCED", f"{dialer} is of generation {generation}, we are of {identity.generation}")
    if dialer == me:
        raise Refused("JOB", f"{me} does not call itself")
    if me not in attached:
        raise Refused("JOB", f"{me} is not in this process")
    return Peer(me, dialer, incarnation, generation, lane), turns.pack_proven(_KIND_WELCOME, b"", key)


class _Turns:
    """One side of a handshake: bounded bytes, one deadline, one transcript.

    Every proof covers the running transcript.
    """

    def __init__(self, sock: HandshakeSocket, seconds: float, binding: bytes = b"") -> None:
        self._sock = sock
        self._end = time.monotonic() + seconds
        # Bytes from the peer, over all messages.
        self._left = BUDGET
        self._transcript = hashlib.sha256(b"topotrain handshake 1")
        if binding:
            self._transcript.update(b"over TLS to " + binding)
        self._claim = self._due = b""

    def send(self, kind: int, body: bytes) -> None:
        """Send a message that proves nothing."""
        self._write(self._pack(kind, body, b""))

    def send_proven(self, kind: int, body: bytes, key: bytes) -> None:
        """Send a message that ends with a proof over everything sent and received so far."""
        self._write(self.pack_proven(kind, body, key))

    def pack_proven(self, kind: int, body: bytes, key: bytes) -> bytes:
        """Pack a message that ends with a proof, for the caller to send."""
        return self._pack(kind, body, hmac.digest(key, self._digest_with(kind, body), "sha256"))

    def receive(self, kind: int, size: int, mac_bytes: int) -> bytes:
        """Return the body of the next message; `proven` checks its proof afterwards."""
        magic, got, length = _PREFIX.unpack(self._read(_PREFIX.size))
        # The length is a claim of the peer until here.
        if magic != MAGIC or length > self._left:
            raise NotOurProtocol("the other side does not speak this handshake")
        # At any turn and of any length: before the kind and the size that were due are checked.
        if got == _KIND_REFUSE and length >= 1:
            raise _refusal(self._read(length))
        if got != kind or length != size + mac_bytes:
            raise NotOurProtocol(
                f"message {got} of {length} bytes in the handshake, expected {kind} of {size + mac_bytes}"
            )
        raw = self._read(length)
        body, self._claim = raw[:size], raw[size:]
        # Before the transcript has the proof itself, as on the side that made it.
        self._due = self._digest_with(kind, body)
        self._transcript.update(_PREFIX.pack(MAGIC, kind, length) + raw)
        return body

    def proven(self, key: bytes) -> bool:
        """Whether the message received last carried the right proof."""
        return hmac.compare_digest(self._claim, hmac.digest(key, self._due, "sha256"))

    def refuse(self, refused: Refused) -> None:
        """Send a refusal if the socket takes it at once."""
        text = refused.text.encode()[:_TEXT_BYTES]
        body = bytes([CODES.index(refused.code)]) + text
        with suppress(OSError):  # the dialer may be gone
            # A peer that does not read must not hold this thread.
            self._sock.send(_PREFIX.pack(MAGIC, _KIND_REFUSE, len(body)) + body, socket.MSG_DONTWAIT)

    def _pack(self, kind: int, body: bytes, mac: bytes) -> bytes:
        raw = _PREFIX.pack(MAGIC, kind, len(body) + len(mac)) + body + mac
        self._transcript.update(raw)
        return raw

    def _digest_with(self, kind: int, body: bytes) -> bytes:
        transcript = self._transcript.copy()
        transcript.update(bytes([kind]) + body)
        return transcript.digest()

    def _write(self, raw: bytes) -> None:
        try:
            self._sock.settimeout(self._seconds_left())
            self._sock.sendall(raw)
        except TimeoutError as error:
            raise HandshakeTimeout("the other side was too slow in the handshake") from error
        except OSError:
            pass  # the peer may have refused and closed: the next read finds its reason, if any

    def _read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise NotOurProtocol(f"more than {BUDGET} bytes in the handshake")
        raw = b""
        while len(raw) < size:
            try:
                self._sock.settimeout(self._seconds_left())
                part = self._sock.recv(size - len(raw))
            except TimeoutError as error:
                raise HandshakeTimeout("the other side was too slow in the handshake") from error
            except OSError as error:
                raise HandshakeAborted(f"the connection broke in the handshake: {error}") from error
            if not part:
                raise HandshakeAborted("the other side closed the connection in the handshake")
            raw += part
        return raw

    def _seconds_left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _key(identity: Identity, side: str, address: Address) -> bytes:
    """Return the key of this side and role: HKDF-SHA256 of one block."""
    # The job's name is the salt: two jobs with one token have different keys.
    secret = hmac.digest(identity.job_id.encode(), identity.token, "sha256")
    return hmac.digest(secret, f"topotrain {side} {address.role.name}\x01".encode(), "sha256")


def _job_hash(identity: Identity) -> bytes:
    return hashlib.sha256(identity.job_id.encode()).digest()


def _address(role: int, group: int, index: int) -> Address:
    if role not in tuple(Role) or group < 0 or index < 0:
        raise NotOurProtocol(f"no such address: role {role}, group {group}, index {index}")
    return Address(Role(role), group, index)


def _refusal(raw: bytes) -> TransportError:
    if raw[0] >= len(CODES):
        return NotOurProtocol(f"refused with unknown code {raw[0]}")
    # The text is unproven: control characters must not reach a terminal or a log.
    return Refused(CODES[raw[0]], printable(raw[1:].decode("utf-8", "replace")))


def _versions(low: int, high: int) -> str:
    return f"version {low}" if low == high else f"versions {low} to {high}"
