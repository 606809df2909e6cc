"""The processes of a running job, and its displays. `live_table` chooses one."""
