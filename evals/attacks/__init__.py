"""What the worker can learn from what it sees, by every published attack, with controls."""
