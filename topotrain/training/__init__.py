"""The worker's side: `prepare`, gradient hooks, data loading, `Trainer`.

The process context, the one global of the package, is in `context`.
"""
