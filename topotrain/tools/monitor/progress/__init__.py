"""Parts of the displays of a running job. `chosen_display` chooses one."""
