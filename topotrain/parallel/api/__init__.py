"""How a script says that a model is to be split, and what it gets back."""
