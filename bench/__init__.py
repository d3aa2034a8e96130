"""Benchmarks, one per claim. Each prints a table last and writes the same figures with --json."""
