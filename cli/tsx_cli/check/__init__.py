"""`tsx check --contract`: what a platform will ask of an image, asked on this machine, within the platform's limits."""
