"""The trusted runner: prompt, activations, KV cache, logits and sampler never leave it in clear."""
