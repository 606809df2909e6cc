"""Messages as flows between sets of equal processes, for layouts of thousands of them."""
