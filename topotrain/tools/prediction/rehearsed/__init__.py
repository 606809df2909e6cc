"""The processes of a rehearsal.

The package has their work, their messages, and the script of a worker.
"""
