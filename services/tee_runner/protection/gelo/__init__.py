"""Masks by left multiplication: A·[H; S] with secret orthogonal A and Gaussian shield rows S."""
