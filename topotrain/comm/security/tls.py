"""TLS 1.3 over a connected socket, while one thread sends and another receives.

Python's SSLSocket must not be used by two threads at once. So the cipher works on memory (`ssl.SSLObject`) under one
lock, which no thread holds while it waits for the network. The sending thread sends the sealed bytes, in order. A
receiving thread never sends.

No certificate is trusted. The listening side makes one for itself, and both sides put the hash of the certificate that
they have seen (the binding, as in RFC 5929's tls-server-end-point) under the proof of the handshake in `handshake`. A
process in between must show a certificate of its own, and then the proofs of the two ends do not match.

The end of the stream is not authenticated: frames carry their own length, and mark the last one.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
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
    """The certificate of a listening process, with its private key and its hash.

    No other process sees the key.

    binding: SHA-256 of the certificate, 32 bytes.
    """

    context: ssl.SSLContext = field(repr=False)
    binding: bytes

    @staticmethod
    def make() -> "Certificate":
        """Make a new key (ECDSA, P-256) and self-sign it.

        Raises TransportError without the package `cryptography`.
        """
        key, certificate, binding = _self_signed()
        context = _tls_1_3(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # every connection is proven anew
        # Python only loads keys from files; this one is memory, so that no disk ever holds the key.
        descriptor = os.memfd_create("topotrain-tls", os.MFD_CLOEXEC)
        with open(descriptor, "wb") as file:
            file.write(key + certificate)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return Certificate(context, binding)


def server_side(sock: socket.socket, certificate: Certificate, seconds: float = DEADLINE) -> "tuple[TlsChannel, bytes]":
    """Perform the TLS handshake as the listening end.

    Returns the channel, which owns the socket from now on, and the binding.

    Raises:
        NotOurProtocol: the other end does not speak TLS 1.3, or not in time (HandshakeTimeout). The caller still owns
            the socket then.
    """
    channel = TlsChannel(sock, certificate.context, server=True)
    channel.shake_hands(seconds)
    return channel, certificate.binding


def client_side(sock: socket.socket, seconds: float = DEADLINE) -> "tuple[TlsChannel, bytes]":
    """Perform the TLS handshake as the dialing end; otherwise as `server_side`.

    Only the binding of the other end is known yet: prove it (`handshake.dial`) before anything is sent or believed.

    Raises:
        NotOurProtocol: as `server_side`.
        Refused: FULL.
    """
    context = _tls_1_3(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proof over the binding does that
    channel = TlsChannel(sock, context, server=False)
    channel.shake_hands(seconds)
    return channel, sha256(channel.certificate()).digest()


class TlsChannel:
    """A `multi_socket.Channel` over TLS that also serves for handshakes.

    At most one thread sends and one receives at a time. With a timeout one thread does both. A sending call that raised
    BlockingIOError or TimeoutError must be repeated with the same bytes: they may be sealed already.

    Args:
        sock: connected, and closed with this.
        context: of this end.
        server: this is the listening end.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server)
        self._lock = threading.Lock()
        self._sealed, self._owed = memoryview(b""), 0  # sealed bytes not sent yet, and how many plain bytes they hold
        self._read = memoryview(bytearray(_SMALL))
        self._budget: int | None = BUDGET
        self._seconds = sock.gettimeout()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- the beginning -------------------------------------------------------------------------------------------

    def shake_hands(self, seconds: float) -> None:
        """Perform TLS's own handshake.

        Raises NotOurProtocol (HandshakeTimeout after `seconds`), or Refused (FULL).
        """
        before, until = self._seconds, time.monotonic() + seconds
        with self._as_not_ours():
            done = False
            while not done:
                try:
                    self._tls.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    pass
                # Also after the last step, which leaves bytes that the other side waits for.
                self._flush(until)
                if not done and not self._feed(0, until):
                    raise HandshakeAborted("the other side closed the connection in the TLS handshake")
        self.settimeout(before)

    def _flush(self, until: float) -> None:
        self._sock.settimeout(_left(until))
        try:
            self._sock.sendall(self._out.read())
        except TimeoutError:
            raise
        except OSError:
            pass  # the peer may have refused and closed: the next read finds its reason, if any

    @contextmanager
    def _as_not_ours(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HandshakeTimeout("the other side was too slow in the TLS handshake") from error
        except ssl.SSLError as error:
            # A listener without a free thread refuses in plain text, before there is any TLS.
            if not self._tls.server_side and self._read[: len(MAGIC)] == MAGIC:
                raise Refused("FULL", "the other side cannot take a connection now") from error
            raise NotOurProtocol(f"the other side does not speak TLS 1.3 as we do ({error.reason})") from error
        except OSError as error:
            raise HandshakeAborted(f"the connection broke in the TLS handshake: {error}") from error

    def certificate(self) -> bytes:
        """Return the certificate that the listening end has shown to this one, in DER."""
        shown = self._tls.getpeercert(binary_form=True)
        if shown is None:
            raise NotOurProtocol("the other side has shown no certificate")
        return shown

    def trust(self) -> None:
        """Lift the limit on received bytes: the peer is proven."""
        self._budget = None

    def relay(self, sock: socket.socket) -> None:
        """Go on over another socket to the same peer; no thread may be using this one."""
        self._sock = sock

    # --- out -----------------------------------------------------------------------------------------------------

    def sendmsg(self, buffers: Iterable[Any], ancdata: Any = (), flags: int = 0, /) -> int:
        """Send at most PIECE bytes of the buffers; return how many."""
        if ancdata:
            raise ValueError("TLS carries no descriptors")
        if not self._sealed:
            self._seal(buffers)
        # The bytes of an earlier call that raised are sent first: a record cannot be sealed twice.
        while self._sealed:
            self._sealed = self._sealed[self._sock.sendmsg([self._sealed], (), flags) :]
        taken, self._owed = self._owed, 0
        return taken

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send from one buffer, as `sendmsg`."""
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
        """Receive at most a record, or with MSG_WAITALL the whole buffer; 0 at the end.

        Other flags have no effect.
        """
        target = memoryview(buffer).cast("B")[: nbytes or None]
        until = None if self._seconds is None else time.monotonic() + self._seconds
        got = 0
        while got < len(target):
            try:
                with self._lock:  # for one record at a time: a sending thread must not wait for many
                    # with a buffer it is a number, whatever the stubs say
                    count = cast("int", self._tls.read(len(target) - got, target[got:]))
            except ssl.SSLWantReadError:
                if self._feed(len(target) - got, until, flags):
                    continue
                break
            got += count
            if not count or not flags & socket.MSG_WAITALL:
                break
        return got

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Receive small parts, as `recv_into`."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer, 0, flags)])

    def recvmsg_into(
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Receive into the first buffer; there are never descriptors."""
        return self.recv_into(next(iter(buffers)), 0, flags), [], 0, None

    def _feed(self, wanted: int, until: float | None, flags: int = 0) -> bool:
        """Take the bytes from the socket, waiting if there are none; False at the end."""
        # Most connections carry small frames only, and there may be thousands of them.
        if wanted > _SMALL and len(self._read) < _LARGE and self._budget is None:
            self._read = memoryview(bytearray(_LARGE))
        if until is not None:
            self._sock.settimeout(_left(until))
        # What is wanted comes in more bytes than it has, of which all but a record are still to come. To wait for them
        # in one call takes no more processor time on a slow link than on a fast one.
        whole = wanted - self._in.pending - 2 * _RECORD if flags & socket.MSG_WAITALL else 0
        flags = socket.MSG_WAITALL if whole > 0 else 0
        count = self._sock.recv_into(self._read, min(max(whole, 0), len(self._read)), flags)
        if self._budget is not None:
            self._budget -= count
            if self._budget < 0:
                raise NotOurProtocol(f"more than {BUDGET} bytes from a peer that has not proven itself")
        # Not while the socket is read: the sending thread needs the lock, too.
        with self._lock:
            self._in.write(self._read[:count])
        return count > 0

    # --- the socket's own ----------------------------------------------------------------------------------------

    def gettimeout(self) -> float | None:
        """Return the seconds that a call may take, or None."""
        return self._seconds

    def settimeout(self, value: float | None, /) -> None:
        """Set the seconds that a whole call may take, over all reads that it needs."""
        self._seconds = value
        self._sock.settimeout(value)

    @property
    def below(self) -> socket.socket:
        """The socket below TLS, to ask the system about it."""
        return self._sock

    def shutdown(self, how: int, /) -> None:
        """Shut the socket down, which wakes a thread that waits for it. Raises OSError."""
        self._sock.shutdown(how)

    def fileno(self) -> int:
        """Return the socket's descriptor, which does not show bytes that were decrypted."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _tls_1_3(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    # Both ends are this package, so no older version is needed.
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    return context


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _self_signed() -> tuple[bytes, bytes, bytes]:
    """Return key and certificate in PEM, and the certificate's SHA-256."""
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
        .not_valid_before(datetime(2000, 1, 1))  # it is used as long as this process runs, whatever the clock says
        .not_valid_after(datetime(9999, 12, 31))
        .sign(key, SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, certificate.public_bytes(Encoding.PEM), certificate.fingerprint(SHA256())
