"""The processes of a running job, and parts of its displays. `live_table` chooses one."""
