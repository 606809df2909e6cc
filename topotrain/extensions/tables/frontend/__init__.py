"""Tables as a script sees them: Embedding, sparse nn.Embedding, export."""
