"""What stands between a connection and its sockets passes bytes on as they are: TLS, and several sockets as one."""

import socket
import struct
import threading
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import examples
from transport_pairs import WAIT, send_parts

from topotrain.comm.security.tls import Certificate, client_side, server_side
from topotrain.comm.transport.multi_socket import STRIPE, MultiSocketChannel

CERTIFICATE = Certificate.make()
RAW = torch.arange(STRIPE * 2, dtype=torch.int32).numpy().tobytes()  # 8 stripes, and more than a piece of TLS


@contextmanager
def tls():
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # often the kernel takes a part of what is sealed
    made = []
    listening = threading.Thread(target=lambda: made.append(server_side(ends[0], CERTIFICATE, WAIT)[0]))
    listening.start()
    made.append(client_side(ends[1], WAIT)[0])
    listening.join(WAIT)
    for channel in made:
        channel.trust()
    yield made
    for channel in made:
        channel.close()


@contextmanager
def lanes(count=3):
    pairs = [socket.socketpair() for _ in range(count)]
    made = [MultiSocketChannel([pair[side] for pair in pairs], 0) for side in (0, 1)]
    yield made
    for channel in made:
        channel.close()


KINDS = {"tls": tls, "lanes": lanes}


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.lists(st.tuples(st.integers(1, 3 * STRIPE), st.booleans()), max_size=8),
    st.lists(st.tuples(st.integers(1, 3 * STRIPE), st.booleans()), max_size=8),
    st.integers(1, 3),
)
@settings(max_examples=examples(40), deadline=None)
def test_what_goes_in_comes_out_however_it_is_cut(kind, sends, receives, buffers):
    with KINDS[kind]() as (here, there):

        def send():
            send_parts(here, RAW, [*sends, (len(RAW), False)], buffers)
            here.shutdown(socket.SHUT_WR)  # much of what was sent has not arrived yet

        sender = threading.Thread(target=send)
        sender.start()
        got = bytearray()
        for size, whole in [*receives, (len(RAW), True)]:
            size = min(size, len(RAW) - len(got))
            if not size:
                break
            target = bytearray(size)
            count = there.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
            assert count == size or (not whole and count > 0)
            got += target[:count]
        sender.join(WAIT)
        assert got == RAW
        assert there.recv_into(bytearray(10), 0, socket.MSG_WAITALL) == 0
        send_parts(there, b"still heard", [(11, True)], 1)
        still = bytearray(11)
        assert here.recv_into(still, 0, socket.MSG_WAITALL) == 11 and still == b"still heard"


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_each_end_at_once(kind):
    size, rounds, wrong = STRIPE + 7, 10, []
    with KINDS[kind]() as pair:

        def talk(channel, seed):
            raw = bytearray(torch.full((size,), seed, dtype=torch.uint8).numpy().tobytes())
            for number in range(rounds):
                struct.pack_into("<I", raw, size // 2, number)
                send_parts(channel, raw, [(size, True)], 1)

        def listen(channel, seed):
            raw = bytearray(size)
            for number in range(rounds):
                count = channel.recv_into(raw, 0, socket.MSG_WAITALL)
                if (count, *struct.unpack_from("<I", raw, size // 2)) != (size, number) or raw.count(seed) < size - 4:
                    wrong.append((seed, number))

        words = [(f, pair[n], s) for n, s in ((0, 5), (1, 6)) for f, s in ((talk, s), (listen, 11 - s))]
        threads = [threading.Thread(target=each, args=rest) for each, *rest in words]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
    assert not wrong
