"""TLS 1.3 over a connected socket, while one thread sends and another receives.

Rule: Python's SSLSocket must not be used by two threads at once, so the cipher works on memory (`ssl.SSLObject`) under
one lock, which nobody holds while waiting for the network. What leaves that memory is sent by whoever sends, in order;
a receiver never sends.

Nobody is trusted for a certificate. The listening side makes one for itself, and both sides put the hash of the one
that they have seen (the binding, as in RFC 5929's tls-server-end-point) under the proof of the handshake in `auth`: who
stands in between must show a certificate of its own, and then the proofs of the two ends do not fit.

The end of the stream is not authenticated: frames say themselves how long they are, and which is the last.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any, Self, cast

from topotrain.comm.security.handshake import DEADLINE, MAGIC, HandshakeAborted, HandshakeTimeout, NotOurProtocol
from topotrain.comm.transport import Refused, TransportError

PIECE = 1 << 17  # bytes that are sealed at once
BUDGET = 1 << 14  # bytes taken from a peer before `trust`: both handshakes need about 2000
_RECORD = 1 << 14  # bytes of a full record
_SMALL, _LARGE = 1 << 12, 1 << 18  # bytes read from the socket at once: for a header, and for what is large


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a listening process shows: a key of its own that no other process ever sees, and the hash of its half.

    binding: SHA-256 of the certificate, 32 bytes.
    """

    context: ssl.SSLContext = field(repr=False)
    binding: bytes

    @staticmethod
    def make() -> "Certificate":
        """A new key (ECDSA, P-256) with a certificate signed by itself. Raises WireError without `cryptography`."""
        key, certificate, binding = _self_signed()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # every connection is proven anew
        # Python only loads keys from files; this one is memory, so that no disk ever holds the key.
        descriptor = os.memfd_create("topotrain-tls", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(key + certificate)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return Certificate(context, binding)


def server_side(sock: socket.socket, certificate: Certificate, seconds: float = DEADLINE) -> "tuple[TlsChannel, bytes]":
    """Be the listening end. Returns the way to talk, which owns the socket from now on, and the binding.

    Raises:
        Stranger: the other end does not speak TLS 1.3, or not in time (TooSlow). The socket stays the caller's.
    """
    channel = TlsChannel(sock, certificate.context, server=True)
    channel.shake_hands(seconds)
    return channel, certificate.binding


def client_side(sock: socket.socket, seconds: float = DEADLINE) -> "tuple[TlsChannel, bytes]":
    """Be the end that has connected; otherwise as `server_side`.

    Nothing is known of the other end yet but its binding: prove it (`auth.dial`) before a word is said or believed.

    Raises:
        Stranger: as there.
        Refused: FULL.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proof over the binding does that
    channel = TlsChannel(sock, context, server=False)
    channel.shake_hands(seconds)
    return channel, sha256(channel.certificate()).digest()


class TlsChannel:
    """A `multi_socket.Channel`, with what a handshake needs of a socket besides; calls mean what they mean there.

    At most one thread sends and one receives at a time; with a timeout it is one thread for both. A sending call that
    raised BlockingIOError or TimeoutError must be made again with the same bytes: they may be sealed already.

    Args:
        sock: connected; closed with this.
        context: of this end.
        server: this is the listening end.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()
        self._sealed, self._owed = memoryview(b""), 0  # what is on its way to the kernel, and the plain bytes it is of
        self._read = memoryview(bytearray(_SMALL))
        self._budget: int | None = BUDGET
        self._seconds = sock.gettimeout()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the beginning -------------------------------------------------------------------------------------------

    def shake_hands(self, seconds: float) -> None:
        """TLS's own handshake. Raises Stranger (TooSlow after `seconds`), or Refused for a listener without room."""
        before, until = self._seconds, time.monotonic() + seconds
        with self._strangeness():
            done = False
            while not done:
                try:
                    self._tls.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    pass
                self._say(until)
                if not done and not self._feed(0, until):
                    raise HandshakeAborted("the other side hung up in the TLS handshake")
        self.settimeout(before)

    def _say(self, until: float) -> None:
        self._sock.settimeout(_left(until))
        try:
            self._sock.sendall(self._out.read())
        except TimeoutError:
            raise
        except OSError:
            pass  # it may have refused us and closed: its reason, if any, is what we read next

    @contextmanager
    def _strangeness(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HandshakeTimeout("the other side was too slow in the TLS handshake") from error
        except ssl.SSLError as error:
            # Who has no thread for us says so before there is any TLS.
            if not self._tls.server_side and self._read[: len(MAGIC)] == MAGIC:
                raise Refused("FULL", "the other side has no room for a connection now") from error
            raise NotOurProtocol(f"the other side does not speak TLS 1.3 as we do ({error.reason})") from error
        except OSError as error:
            raise HandshakeAborted(f"the connection broke in the TLS handshake: {error}") from error

    def certificate(self) -> bytes:
        """The one that the listening end has shown to this one, in DER."""
        shown = self._tls.getpeercert(binary_form=True)
        if shown is None:
            raise NotOurProtocol("the other side has shown no certificate")
        return shown

    def trust(self) -> None:
        """The peer is proven: from now on it may send as much as it likes."""
        self._budget = None

    def relay(self, change: Callable[[socket.socket], socket.socket]) -> None:
        """Go on over the socket that `change` makes of this one; nobody is sending or receiving now."""
        self._sock = change(self._sock)

    # --- out -----------------------------------------------------------------------------------------------------

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, /) -> int:
        """Send at most PIECE bytes of the buffers; returns how many. Descriptors cannot travel."""
        if ancdata:
            raise ValueError("TLS carries no descriptors")
        if not self._sealed:
            self._seal(buffers)
        while self._sealed:
            self._sealed = self._sealed[self._sock.sendmsg([self._sealed], (), flags) :]
        taken, self._owed = self._owed, 0
        return taken

    def send(self, data: Any, flags: int = 0, /) -> int:
        """As `sendmsg`, of one buffer."""
        return self.sendmsg([data], (), flags)

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Send the whole buffer."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
        while view:
            view = view[self.sendmsg([view], (), flags) :]

    def _seal(self, buffers: Iterable[Any]) -> None:
        parts, room = [], PIECE
        for buffer in buffers:
            view = memoryview(buffer)
            if view.nbytes and room:  # an empty one cannot be cast
                parts.append(view.cast("B")[:room])
                room -= len(parts[-1])
        if len(parts) > 1 and PIECE - room <= _RECORD:
            parts = [memoryview(b"".join(parts))]  # one record costs less than several
        with self._lock:
            for part in parts:
                while part:
                    part = part[self._tls.write(part) :]
            self._sealed, self._owed = memoryview(self._out.read()), PIECE - room

    # --- in ------------------------------------------------------------------------------------------------------

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into the buffer: at most a record, or with MSG_WAITALL all of it; 0 at the end. No other flags."""
        target = memoryview(buffer).cast("B")[: nbytes or None]
        until = None if self._seconds is None else time.monotonic() + self._seconds
        got = 0
        while got < len(target):
            try:
                with self._lock:  # for one record at a time: who sends must not wait for many
                    # with a buffer it is a number, whatever the stubs say
                    count = cast("int", self._tls.read(len(target) - got, target[got:]))
            except ssl.SSLWantReadError:
                if self._feed(len(target) - got, until):
                    continue
                break
            got += count
            if not count or not flags & socket.MSG_WAITALL:
                break
        return got

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As `recv_into`, for small parts."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer, 0, flags)])

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Receive into the first buffer; there are never descriptors."""
        return self.recv_into(next(iter(buffers)), 0, flags), [], 0, None

    def _feed(self, wanted: int, until: float | None) -> bool:
        """Take from the socket what is there, or wait for it; False at the end."""
        if wanted > _SMALL and len(self._read) < _LARGE and self._budget is None:
            self._read = memoryview(bytearray(_LARGE))
        if until is not None:
            self._sock.settimeout(_left(until))
        count = self._sock.recv_into(self._read)
        if self._budget is not None:
            self._budget -= count
            if self._budget < 0:
                raise NotOurProtocol(f"more than {BUDGET} bytes from a peer that has not proven itself")
        with self._lock:
            self._in.write(self._read[:count])
        return count > 0

    # --- the socket's own ----------------------------------------------------------------------------------------

    def gettimeout(self) -> float | None:
        """Seconds that a call may take, or None."""
        return self._seconds

    def settimeout(self, value: float | None, /) -> None:
        """Seconds that a call may take, however many parts of the network's it needs."""
        self._seconds = value
        self._sock.settimeout(value)

    @property
    def below(self) -> socket.socket:
        """The socket, to ask the system about it."""
        return self._sock

    def shutdown(self, how: int, /) -> None:
        """Shut the socket down, which wakes whoever waits for it. Raises OSError."""
        self._sock.shutdown(how)

    def fileno(self) -> int:
        """The socket's number. A selector does not see what has been taken from the socket and not been read here."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _self_signed() -> tuple[bytes, bytes, bytes]:
    """Key and certificate in PEM, and the certificate's SHA-256."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        raise TransportError(
            "an address that other machines reach needs TLS, and TLS the package cryptography: "
            "pip install 'topotrain[tls]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "topotrain")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))  # it lives as long as this process, and asks no clock
        .not_valid_after(datetime(9999, 12, 31))
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, certificate.public_bytes(Encoding.PEM), certificate.fingerprint(SHA256())
