"""Parts of the displays of a running job. `live_table` chooses one."""
