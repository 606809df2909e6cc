"""`python -I -S process_pool_client.py SOCKET WORDS…`: be `python WORDS…`, forked from `process_pool`.

A shell's commands are made so: this process has the shell's streams, hands them over, and ends as the fork ends.
"""

import json
import os
import socket
import struct
import sys

with socket.socket(socket.AF_UNIX) as warm:
    warm.connect(sys.argv[1])
    body = json.dumps({"words": sys.argv[2:], "cwd": os.getcwd(), "environ": dict(os.environ)}).encode()
    socket.send_fds(warm, [struct.pack("!I", len(body))], [0, 1, 2])
    warm.sendall(body)
    _, code = (int(line) for line in warm.makefile("r"))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
