"""Tables for scripts: Embedding, sparse nn.Embedding, export."""
