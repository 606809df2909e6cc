"""The page of a job in the browser: its server, its requests, and the mailed file."""
