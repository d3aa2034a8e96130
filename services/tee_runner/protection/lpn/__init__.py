"""LPN-blinded offload: operands hidden by e + f·G over Z/2^32, with parameters chosen by an estimator."""
