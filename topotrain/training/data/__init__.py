"""The batches of a loader, divided among workers and counted."""
