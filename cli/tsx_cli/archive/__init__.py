"""`tsx archive`: pack, check and edit archives."""

POSITION = 10
SUMMARY = "Pack a trained model into one .mar file; inspect, verify, unpack or check one."
