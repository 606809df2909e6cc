"""The processes of a rehearsal: their work, their messages, and the script of a worker."""
