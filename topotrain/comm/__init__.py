"""How bytes travel between processes, and how processes find each other."""
