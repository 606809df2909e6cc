"""The schema of a model, and the layout of its memory, for servers and workers."""
