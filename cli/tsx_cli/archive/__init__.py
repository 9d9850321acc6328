"""`tsx archive`: pack, check and edit archives."""
