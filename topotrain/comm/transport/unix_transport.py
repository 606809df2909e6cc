"""The transport inside a host: frames over Unix sockets, payloads by reference."""

import os
import secrets
import socket
import struct
from pathlib import Path
from urllib.parse import SplitResult, unquote

from topotrain.comm.security.handshake import Identity
from topotrain.comm.transport import TransportError
from topotrain.comm.transport.inline_reader import InlineReader
from topotrain.comm.transport.listener import BACKLOG
from topotrain.comm.transport.shared_memory import ProcessMemory
from topotrain.comm.transport.socket_transport import SocketTransport
from topotrain.config.private_files import FILE_MODE

_SUN_PATH = 107  # bytes of a Unix socket's path
_UCRED = struct.Struct("3i")


class SharedMemoryTransport(SocketTransport):
    """The transport inside a host.

    Its socket is in `directory`, which only this user may enter (made if missing).

    Raises:
        TransportError: the directory is open to others, or its path is too long for a Unix socket.
    """

    schemes = ("unix",)

    def __init__(
        self,
        identity: Identity,
        directory: str,
        memory: ProcessMemory,
        patience: float = 10.0,
        pump: InlineReader | None = None,
    ) -> None:
        super().__init__(identity, memory, patience, pump)
        self.memory = memory
        # Random: the processes of a job share the directory, and one that was killed leaves its socket there.
        self._path = os.path.join(os.path.abspath(directory), secrets.token_hex(6))
        if len(os.fsencode(self._path)) > _SUN_PATH:
            raise TransportError(
                f"directory = {directory!r}: too long for a Unix socket, use one under the temp directory"
            )
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # The folder may have existed before, with other rights than `makedirs` gives.
        info = os.stat(directory)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise TransportError(
                f"directory = {directory!r}: must belong to this user and be closed to others (mode 0700)"
            )

    def close(self) -> None:
        """End all connections, as every socket transport does, and remove the socket."""
        super().close()
        Path(self._path).unlink(missing_ok=True)

    def _listen(self) -> tuple[socket.socket, str]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), FILE_MODE)  # the socket's file gets this mode, too
            sock.bind(self._path)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise TransportError(f"cannot listen at {self._path}: {error}") from error
        return sock, Path(self._path).as_uri().replace("file:", "unix:", 1)

    def _open_socket(self, url: SplitResult, seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds)
            sock.connect(unquote(url.path))
        except BaseException:
            sock.close()
            raise
        return sock

    def _inspect(self, sock: socket.socket) -> None:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(raw)
        if uid != os.geteuid():
            raise TransportError(f"the process at the other end belongs to user {uid}")
