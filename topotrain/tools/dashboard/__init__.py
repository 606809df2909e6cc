"""The page of a job in the browser: its server, what it may be asked, and the file that can be mailed."""
