"""The wire: the one thing the trusted runner and the untrusted worker both import."""
