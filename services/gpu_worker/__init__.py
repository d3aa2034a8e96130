"""The untrusted worker: public weights, matrix products over protected operands, nothing else."""
