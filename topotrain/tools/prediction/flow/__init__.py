"""Messages as flows between sets of equal processes.

They are for layouts of thousands of processes.
"""
