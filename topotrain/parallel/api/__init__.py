"""How a script asks for a split model, and the objects that it gets back."""
