"""The job token, the handshake that proves it, and TLS."""
