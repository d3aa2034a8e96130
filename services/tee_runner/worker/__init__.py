"""Client of the untrusted worker. Every byte that comes back is checked before it is used."""
