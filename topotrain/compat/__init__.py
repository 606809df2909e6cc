"""The same job through the interfaces of other systems."""
