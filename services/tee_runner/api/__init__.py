"""The front-end: HTTP over RA-TLS."""
