"""Evaluations: what an adversary learns, measured."""
