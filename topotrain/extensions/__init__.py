"""Optional features of servers, clients and workers, each in a package of its own."""
