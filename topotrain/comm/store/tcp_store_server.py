"""The server of a tcp:// store: one table, a thread per connection.

* An unproven peer cannot stop the server. A handshake has its own thread, two seconds and 512 bytes, and at most
  MAX_STRANGERS handshakes run at once.
* A stopped client cannot stop the server either. Each connection is written to by its own thread only, and a write to
  the table merely wakes the threads that watch the key.
* A watch is answered in the moment of the change, without polling.

Values are in memory: when the server ends they are lost.
"""

import errno
import os
import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from topotrain.comm.security.handshake import refuse
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix
from topotrain.comm.store.memory_store import MemoryTable
from topotrain.comm.store.tcp_store_handshake import bound, certificate_for, come_in, identity, resolve, shown
from topotrain.comm.store.tcp_store_protocol import (
    MalformedFrame,
    Op,
    Reply,
    Status,
    StoreRequest,
    receive_request,
    send_reply,
)
from topotrain.comm.transport import Refused, TransportError
from topotrain.comm.transport.multi_socket import HandshakeSocket

if TYPE_CHECKING:
    from topotrain.comm.security.tls import Certificate

MAX_STRANGERS = 64
MAX_CONNECTIONS = 4096
FRAME_SECONDS = 30.0
"""For one frame of a client, in or out; a client that stops in the middle of one loses its connection."""
_BACKLOG = 128
_CLOSING = 5.0  # seconds for threads to end


class TcpServer:
    """A store server, which serves from its construction until `close`.

    host: an address of this machine. port: 0 for any that is free. url: where others reach it.

    Raises:
        AddressInUse: the port is taken.
        AddressElsewhere: the address belongs to another machine.
        StoreError: the address cannot be served at for another reason.
        ValueError: the secret does not have 32 bytes.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._identity = identity(secret)
        self._listener, self._certificate = _listen(host, port, secret)
        self.url = shown(host, self._listener.getsockname()[1])
        self._table = MemoryTable()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._strangers = 0
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._doorman = threading.Thread(target=self._accept, name=f"store {self.url}", daemon=True)
        self._doorman.start()

    def close(self) -> None:
        """Close all connections and end all threads."""
        with self._lock:
            if self._stop.is_set():
                return
            self._stop.set()
            threads = dict(self._threads)
        _hang_up(self._listener)
        self._doorman.join(_CLOSING)
        self._listener.close()
        for sock in threads:
            _hang_up(sock)
        for thread in threads.values():
            thread.join(_CLOSING)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._stop.wait(0.05)  # out of descriptors: some will be closed; closing: the loop ends
                continue
            self._let_in(sock)

    def _let_in(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._host, args=(sock,), name="store client", daemon=True)
        with self._lock:
            room = self._strangers < MAX_STRANGERS and len(self._threads) < MAX_CONNECTIONS
            if room and not self._stop.is_set():
                self._threads[sock] = thread
                self._strangers += 1
                with suppress(RuntimeError):  # the system has no thread left
                    thread.start()
                    return
                del self._threads[sock]
                self._strangers -= 1
        refuse(sock, Refused("FULL", "this store cannot take a connection now; try again"))
        sock.close()

    def _host(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, TransportError, MalformedFrame):
            try:
                try:
                    line = come_in(sock, self._identity, self._certificate)
                finally:
                    with self._lock:
                        self._strangers -= 1
                self._serve(line)
            finally:
                with self._lock:
                    self._threads.pop(sock, None)

    def _serve(self, sock: HandshakeSocket) -> None:
        while not self._stop.is_set():
            request = receive_request(sock, FRAME_SECONDS)
            if request is None:
                return
            try:
                (check_prefix if request.op is Op.KEYS else check_key)(request.key)
                reply = self._watch(sock, request) if request.op is Op.WATCH else _answer(self._table, request)
            except (StoreError, ValueError) as error:
                reply = Reply(Status.REFUSED, str(error).encode())
            send_reply(sock, reply)

    def _watch(self, sock: HandshakeSocket, request: StoreRequest) -> Reply:
        """Wait for the value.

        Raises MalformedFrame when the client closes or sends meanwhile.
        """
        until = time.monotonic() + request.seconds
        bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            sight = select.poll()
            sight.register(sock, select.POLLIN)
            sight.register(bell, select.POLLIN)
            with self._table.watching(request.key, lambda: os.eventfd_write(bell, 1)):
                while True:
                    value = self._table.get(request.key)
                    if value is not None and value != request.known:
                        return Reply(Status.YES, value)
                    left = until - time.monotonic()
                    if left <= 0:
                        return Reply(Status.TIMEOUT)
                    ready = dict(sight.poll(min(left, 3600.0) * 1000 + 1))
                    if sock.fileno() in ready:
                        raise MalformedFrame("a client closed its connection, or sent a request, while it watched")
                    if bell in ready:
                        os.eventfd_read(bell)
        finally:
            os.close(bell)


class AddressInUse(StoreError):
    """Another program listens at the address already."""


class AddressElsewhere(StoreError):
    """The address belongs to another machine."""


def _listen(host: str, port: int, secret: bytes) -> "tuple[socket.socket, Certificate | None]":
    try:
        family, address = resolve(host, port)
    except OSError as error:
        raise StoreError(f"store {shown(host, port)}: {error.strerror}") from error
    certificate = certificate_for(host, address, port, secret)
    try:
        sock = bound(family, address, port, _BACKLOG)
    except OSError as error:
        kinds = {errno.EADDRINUSE: AddressInUse, errno.EADDRNOTAVAIL: AddressElsewhere}
        raise kinds.get(error.errno or 0, StoreError)(f"store {shown(host, port)}: {error.strerror}") from error
    return sock, certificate


def _answer(table: MemoryTable, request: StoreRequest) -> Reply:
    key, value, known, life, once = request.key, request.value, request.known, request.life, request.once
    if request.op is Op.GET:
        found = table.get(key)
        return Reply(Status.NO) if found is None else Reply(Status.YES, found)
    if request.op is Op.KEYS:
        return Reply(Status.YES, "\n".join(table.keys(key)).encode())
    if request.op is Op.SET:
        done = table.set(key, value, life, once)
    elif request.op is Op.DELETE:
        done = table.delete(key, once)
    else:
        done = table.compare_and_set(key, known, value, life, once)
    return Reply(Status.YES if done else Status.NO)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        sock.shutdown(socket.SHUT_RDWR)
