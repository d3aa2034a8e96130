"""The forward pass, written once: a ragged batch of rows, prefill and decode alike."""
