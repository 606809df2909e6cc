"""The doors through which users come in. The one global of the package, the process context, lives in `context`."""
