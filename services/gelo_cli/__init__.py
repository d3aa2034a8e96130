"""The command line `gelo`."""
