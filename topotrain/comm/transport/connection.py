"""One connection over a socket: frames out, frames in, all lengths checked.

* The fields of a message ("meta") are at most 64 KiB and typed.
* Its payload is at most 64 MiB, must have exactly the size of the tensor that the receiver names for it, and is
  received directly into that tensor.
* Any error in a frame ends the connection, with a reason that both sides get.
* Each direction carries its frames in order and once. They are numbered, and a gap ends the connection.

With `ProcessMemory`, a payload that lies in a region travels as a reference to it, and may be as large
as the region.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from topotrain.comm.transport import ConnectionLost, Endpoint
from topotrain.comm.transport.frame import (
    BEAT,
    BODY,
    BYE,
    CONTROL,
    HEADER_BYTES,
    REFERENCE,
    REFERENCE_AT,
    REGION,
    REGION_IS,
    Header,
)
from topotrain.comm.transport.frame_reader import EndOfStream, FrameReader
from topotrain.comm.transport.frame_writer import FrameWriter, ReaderThread
from topotrain.comm.transport.multi_socket import Channel
from topotrain.config.topology import Address, Role
from topotrain.core.protocol import MAX_BODY, Message, ProtocolError, decode, encode

if TYPE_CHECKING:  # a launcher connects without bodies, and does not load torch
    import torch

    from topotrain.comm.transport.shared_memory import OwnRegion, ProcessMemory

_MAX_REGIONS = 4096
_MAX_REASON = 1000  # bytes


class Connection:
    """One connection to one peer.

    `start` or `run` it once; from then on its reader calls the endpoint.

    `send` does not copy a body: the body must not change until the peer has read it (see the class of the message).
    `greeting` is sent before every frame. `ended` is called once, after the endpoint's `lost`.
    """

    def __init__(
        self,
        sock: Channel,
        me: Address,
        peer: Address,
        endpoint: Endpoint,
        generation: int,
        memory: "ProcessMemory | None" = None,
        greeting: bytes = b"",
        ended: Callable[["Connection"], None] = lambda _: None,
    ) -> None:
        # The handshake has left its deadline on the socket.
        sock.settimeout(None)
        self.me, self.peer, self.generation = me, peer, generation
        self.interrupted = False
        self.sent = self.received = 0  # bytes of messages; a reference counts as the payload it stands for
        self._sock, self._endpoint, self._memory, self._ended = sock, endpoint, memory, ended
        self._frames = FrameReader(sock, with_fds=memory is not None)
        self._out = FrameWriter(sock, f"to {peer}", greeting)
        self._reader: threading.Thread | None = None
        self._done = threading.Event()
        self._closing = self._lingering = False
        # See `frame_writer`: only such a reader may wait for the queue of its own answers.
        self._only_answers = me.role is Role.SERVER and peer.role is Role.WORKER
        self._number_out = 0
        self._announced: set[int] = set()
        self._foreign: dict[int, torch.Tensor] = {}
        self._ours = self._theirs = self._fault = ""  # why it ends: this side's decision, the peer's text, the system's

    @property
    def reason(self) -> str:
        """The reason why the connection ended or is ending."""
        fault = self._fault or (_broke(self._out.error) if self._out.error is not None else "")
        return self._ours or self._theirs or fault or "the peer closed without giving a reason; did its process die?"

    # --- out -----------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Bytes that wait to be sent; see `frame_writer`."""
        return self._out.queued

    def send(self, message: Message, wait: bool = False) -> None:
        """Queue a message. With `wait`, a body waits for space (see `Transport.send`).

        Raises:
            ConnectionLost: the connection has ended or is ending, perhaps while this waited.
            ValueError: a body that cannot travel.
            KeyboardInterrupt: Ctrl-C came meanwhile (see `interrupt_guard`); the message has been queued.
        """
        kind, meta = encode(message)
        body, payload, found = message.body, _NOTHING, None
        if body is not None:
            payload = byte_view(body)
            found = None if self._memory is None else self._memory.find(body)
        size = len(payload)
        if found is None and size > MAX_BODY:
            raise ValueError(f"a body of {size} bytes: outside of shared memory it must be at most {MAX_BODY}")
        with self._out.lock:
            if wait and body is not None:
                # The payload of a reference stays in shared memory and takes no space in the queue.
                self._out.wait_for_room(0 if found is not None else size)
            # After the wait, during which the connection may have ended.
            if self._closing:
                raise ConnectionLost(f"no connection from {self.me} to {self.peer}: {self.reason}")
            if found is not None:
                region, offset = found
                # Before the first reference to it, and once: the peer maps it for the length of the connection.
                self._announce(region)
                self._frame_out(REFERENCE, kind, meta, 0, REFERENCE_AT.pack(region.id, offset, size))
            elif body is not None:
                self._frame_out(BODY, kind, meta, size, payload)
            else:
                self._frame_out(0, kind, meta)
            self.sent += HEADER_BYTES + len(meta) + size
        # After the frame and outside the lock: the peer gets whole frames, and other threads can still send.
        if self.interrupted and self.clear_interrupt():
            raise KeyboardInterrupt

    def _announce(self, region: "OwnRegion") -> None:
        if region.id not in self._announced:
            self._announced.add(region.id)
            self._frame_out(CONTROL, REGION, REGION_IS.pack(region.id, region.nbytes), fds=(region.fd,))

    def _frame_out(
        self,
        flags: int,
        kind: int,
        meta: bytes,
        size: int = 0,
        tail: bytes | memoryview = b"",
        fds: tuple[int, ...] = (),
    ) -> None:
        """Send or queue one frame; the writer is locked."""
        self._number_out += 1
        head = Header(flags, kind, len(meta), size, self.generation, self._number_out).pack() + meta
        # Small tails are joined for one system call; a body is never copied.
        if isinstance(tail, bytes):
            self._out.put([memoryview(head + tail)], fds)
        else:
            self._out.put([memoryview(head), tail] if size else [memoryview(head)], fds)

    def interrupt(self) -> None:
        """Have `send` raise KeyboardInterrupt once its frame is sent."""
        self.interrupted = True

    def clear_interrupt(self) -> bool:
        """Keep `send` from raising KeyboardInterrupt; return whether it was going to."""
        interrupted, self.interrupted = self.interrupted, False
        return interrupted

    def beat(self) -> None:
        """Send an empty frame for the other host to acknowledge, unless others are queued."""
        with self._out.lock:
            if self._out.empty and not self._closing:
                self._frame_out(CONTROL, BEAT, b"")

    # --- in ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read on a thread of its own."""
        self._reader = ReaderThread(target=self.run, name=f"from {self.peer}", daemon=True)
        self._reader.start()

    def run(self) -> None:
        """Read on the calling thread until the connection ends."""
        self._reader = threading.current_thread()
        self._reader.name = f"from {self.peer}"
        self._read()
        self.end()

    def send_greeting(self) -> None:
        """Send the greeting now."""
        self._out.send_greeting()

    def fileno(self) -> int:
        """Return the socket's number, for a selector."""
        return self._sock.fileno()

    def turn(self) -> bool:
        """Process the frames that have come; False at the end, and then call `end`."""
        return self._read(turn=True)

    def _read(self, turn: bool = False) -> bool:
        """Process frames until the connection has ended; then return False.

        turn: return True after the frames that have come.
        """
        try:
            # The dialer sends nothing before it has this greeting, the WELCOME of the handshake.
            self._out.send_greeting()
            while self._frame_in():
                # Bytes that were read ahead do not show in the selector, so they are processed now.
                if turn and not self._frames.pending:
                    return True
                # Not in a turn: its thread reads other connections, too, and must not wait for one of them.
                if self._only_answers and not turn:
                    self._out.wait_until_taken()
        except ProtocolError as error:
            self._refuse(str(error))
        except (EndOfStream, OSError) as error:
            self._fault = _broke(self._out.error or error)
        except Exception as error:  # an error in the endpoint must not leave a connection that no thread reads
            self._refuse(f"internal error: {type(error).__name__}: {error}")
        # KeyboardInterrupt, where the script's own thread reads.
        except BaseException:
            if not turn:
                self.end()
            raise
        return False

    def _frame_in(self) -> bool:
        if not self._frames.wait():
            return False
        header, meta = self._frames.frame(self.generation)
        if header.flags == CONTROL:
            return self._control(header.kind, meta)
        message = decode(header.kind, meta)
        size = header.payload
        if header.flags == REFERENCE:
            number, offset, size = REFERENCE_AT.unpack(self._frames.read(REFERENCE_AT.size))
            message.receive(self._referenced(message, number, offset, size))
        elif header.flags == BODY:
            message.receive(self._received_body(message, size))
        self.received += HEADER_BYTES + header.meta + size
        self._endpoint.handle(self.peer, message)
        return True

    def _received_body(self, message: Message, size: int) -> "torch.Tensor":
        # The size comes from the endpoint's own buffer: a number of the peer never reaches an allocator.
        target, payload = landing(self._endpoint.place(self.peer, message, False), message, size)
        if size:
            self._frames.read_into(payload)
        return target

    def _referenced(self, message: Message, number: int, offset: int, size: int) -> "torch.Tensor":
        region = self._foreign.get(number)
        if region is None or offset + size > region.numel():
            raise ProtocolError(f"a reference to bytes {offset} to {offset + size} of region {number}, out of bounds")
        view = region[offset : offset + size]
        # The endpoint may keep a view of the sender's memory, or have the bytes copied into a buffer of its own.
        target = self._endpoint.place(self.peer, message, True)
        if target is None:
            # The endpoint compares the size of a view with its schema when it handles the message.
            return view
        return copied(target, message, view)

    def _control(self, kind: int, meta: bytes) -> bool:
        if kind == BYE:
            self._theirs = meta.decode("utf-8", "replace")
            with self._out.lock:
                self._closing = self._lingering = True
                self._out.finish()
            return False
        if kind == BEAT and not meta:
            return True
        if kind != REGION or self._memory is None or len(meta) != REGION_IS.size:
            raise ProtocolError(f"unknown control frame {kind}")
        number, nbytes = REGION_IS.unpack(meta)
        fd = self._frames.pop_fd()
        if fd is None:
            raise ProtocolError(f"region {number} came without its memory")
        # `map` closes the descriptor, also when it refuses the memory.
        view = self._memory.map(fd, nbytes)
        if number in self._foreign or len(self._foreign) >= _MAX_REGIONS:
            raise ProtocolError(f"region {number} was named twice, or is one too many")
        self._foreign[number] = view
        return True

    # --- the end -------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """End on purpose: refuse new messages, and send the queued ones and BYE."""
        with self._out.lock:
            if not self._closing:
                self._ours, self._lingering = "closed on this side", True
                self._frame_out(CONTROL, BYE, b"closed by the peer")
                self._closing = True
                self._out.finish()

    def cut(self, reason: str) -> None:
        """End now, whatever is queued."""
        with self._out.lock:
            self._ours = self._ours or reason
            self._closing, self._lingering = True, False
            self._out.cut()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the connection; return whether it is over."""
        # A reader closes its own connection from `Endpoint.handle`, and would wait for itself.
        if self._reader is threading.current_thread():
            return True
        until = time.monotonic() + seconds
        if not self._done.wait(max(0.0, seconds)):
            return False
        if self._reader is not None:
            self._reader.join(max(0.0, until - time.monotonic()))
        return True

    def _refuse(self, reason: str) -> None:
        """End the connection for an error of the peer."""
        with self._out.lock:
            self._ours = self._ours or reason
            # Behind a queue the reason might never leave: a faulty peer may not be reading.
            if self._out.empty and not self._closing:
                self._frame_out(CONTROL, BYE, f"refused by the peer: {reason}".encode()[:_MAX_REASON])
            self._closing, self._lingering = True, False

    def end(self) -> None:
        """Close after the last frame was read, and notify the endpoint and the owner."""
        if self._lingering:
            self._out.drain()  # a peer that closes on purpose still takes what is queued; `cut` ends this wait
        with self._out.lock:
            self._closing = True
        self._out.stop()
        with self._out.lock:  # no thread may be inside a call on the descriptor when its number becomes free
            self._sock.close()
        self._frames.close()
        # Mapped memory of the peer is released, unless a tensor still shows it.
        self._foreign.clear()
        try:
            self._endpoint.lost(self.peer, self.reason)
        finally:
            self._ended(self)  # only now may a newer connection of the peer come without waiting for this one
            self._done.set()


def landing(target: "torch.Tensor | None", message: Message, size: int) -> "tuple[torch.Tensor, memoryview]":
    """Return the buffer of a payload, and its bytes. Raises ProtocolError.

    size: of the payload, in bytes.
    """
    if target is None:
        name = type(message).__name__
        raise ProtocolError(f"{name} came with a payload of {size} bytes that has no place here")
    try:
        payload = byte_view(target)
    except ValueError as error:
        raise ProtocolError(f"the buffer for {type(message).__name__}: {error}") from error
    if len(payload) != size:
        raise ProtocolError(f"{type(message).__name__} has a payload of {size} bytes, the schema says {len(payload)}")
    return target, payload


def _broke(error: Exception) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):  # a host that cut an unreachable peer resets, too
        return f"the connection broke ({error.strerror}): its process died, or its host found this one out of reach"
    return str(error) if isinstance(error, EndOfStream) else f"the connection broke: {error}"


def copied(target: "torch.Tensor | None", message: Message, view: "torch.Tensor") -> "torch.Tensor":
    """Copy these bytes into the buffer of a payload. Raises ProtocolError."""
    found, _ = landing(target, message, view.nbytes)
    found.detach().view(view.dtype).copy_(view)
    return found


_NOTHING = memoryview(b"")


def byte_view(tensor: "torch.Tensor") -> memoryview:
    """Return the tensor's own memory.

    Raises ValueError unless it is 1-D, contiguous and on the CPU.
    """
    try:
        view: memoryview = tensor.numpy().data
        if view.ndim == 1 and view.c_contiguous:
            return view.cast("B")
    # NumPy has no bfloat16, and takes no tensor that requires a gradient. A cast takes no complex number.
    except (TypeError, ValueError, RuntimeError):
        pass
    return _uncommon_view(tensor)


def _uncommon_view(tensor: "torch.Tensor") -> memoryview:
    import torch  # here, because a launcher connects without bodies, and does not load torch

    if tensor.ndim != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        what = f"{tuple(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
        raise ValueError(f"a body must be 1-D, contiguous and on the CPU, not {what}")
    view: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return view
