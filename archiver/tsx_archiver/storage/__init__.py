"""The cache of unpacked archives: private directories, locks, digests, atomic files, and copies."""
