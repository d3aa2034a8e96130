"""Text that prompts are made of."""
