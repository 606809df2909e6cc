"""The server of a tcp:// store: one table, a thread per connection.

* A stopped client cannot stop the server. Each connection is written to by its own thread only, and a write to
  the table merely wakes the threads that watch the key.
* A watch is answered in the moment of the change, without polling.

Values are in memory: when the server ends they are lost.
"""

import errno
import os
import select
import threading
import time

from topotrain.comm.request_reply import RequestChannel, RequestServer
from topotrain.comm.store.key_validation import StoreError, check_key, check_prefix
from topotrain.comm.store.memory_store import MemoryTable
from topotrain.comm.store.tcp_store_protocol import (
    SERVICE,
    Op,
    Reply,
    Status,
    StoreRequest,
    receive_request,
    send_reply,
)
from topotrain.comm.transport import ConnectionLost, TransportError
from topotrain.comm.transport.listener import MAX_CONNECTIONS
from topotrain.comm.transport.tcp_socket import url_of


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
        try:
            self._server = RequestServer(SERVICE, host, port, secret, self.serve_client, MAX_CONNECTIONS)
        except TransportError as error:
            raise StoreError(f"store {url_of(host, port)}: {error}") from error
        except OSError as error:
            kinds = {errno.EADDRINUSE: AddressInUse, errno.EADDRNOTAVAIL: AddressElsewhere}
            raise kinds.get(error.errno or 0, StoreError)(f"store {url_of(host, port)}: {error.strerror}") from error
        self.url = url_of(host, self._server.port)
        self._table = MemoryTable()
        self._closed = threading.Event()
        self._server.start()

    def close(self) -> None:
        """Close all connections and end all threads."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.close()

    def serve_client(self, channel: RequestChannel) -> None:
        """Answer the requests of one client."""
        while not self._closed.is_set() and (request := receive_request(channel)) is not None:
            try:
                (check_prefix if request.op is Op.KEYS else check_key)(request.key)
                reply = self._watch(channel, request) if request.op is Op.WATCH else _answer(self._table, request)
            except (StoreError, ValueError) as error:
                reply = Reply(Status.REFUSED, str(error).encode())
            send_reply(channel, reply)

    def _watch(self, channel: RequestChannel, request: StoreRequest) -> Reply:
        """Wait for the value. ConnectionLost when the client closes or sends meanwhile."""
        until = time.monotonic() + request.seconds
        # Before the first look: a write in between would not be noticed.
        with self._table.watching(request.key) as change:
            ready = select.poll()
            ready.register(channel, select.POLLIN)
            ready.register(change, select.POLLIN)
            while True:
                value = self._table.get(request.key)
                if value is not None and value != request.known:
                    return Reply(Status.YES, value)
                left = until - time.monotonic()
                if left <= 0:
                    return Reply(Status.TIMEOUT)
                # Bytes that were read ahead do not show in the poll. It takes whole milliseconds, and not too many.
                events = dict(ready.poll(0 if channel.pending else min(left, 3600.0) * 1000 + 1))
                # The client has only one request at a time, so bytes that come now end the connection.
                if channel.pending or channel.fileno() in events:
                    raise ConnectionLost("a client closed its connection, or sent a request, while it watched")
                if change in events:
                    os.eventfd_read(change)


class AddressInUse(StoreError):
    """Another program listens at the address already."""


class AddressElsewhere(StoreError):
    """The address belongs to another machine."""


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
