"""`python -I -S process_pool_client.py SOCKET WORDS…`: be `python WORDS…`, forked from `process_pool`.

A shell's commands are made so: this process has the shell's streams, hands them over with all other descriptors that
it has inherited, hands on the signals that ask it to end, and ends as the fork ends.
"""

import json
import os
import signal
import socket
import struct
import sys

fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
with socket.socket(socket.AF_UNIX) as warm:
    warm.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "cwd": os.getcwd(), "environ": dict(os.environ), "fds": fds}
    body = json.dumps(request).encode()
    socket.send_fds(warm, [struct.pack("!I", len(body))], fds)
    warm.sendall(body)
    answers = warm.makefile("r")
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(answers.readline())
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
