"""`python -I -S process_pool_client.py SOCKET WORDS…`: be `python WORDS…`, forked from `process_pool`.

A shell's commands are made so: this process has the shell's streams, hands them over with all other descriptors that
it has inherited, and ends as the fork ends.
"""

import json
import os
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
    _, code = (int(line) for line in warm.makefile("r"))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
