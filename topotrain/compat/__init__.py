"""The interfaces of other systems, for the same job."""
