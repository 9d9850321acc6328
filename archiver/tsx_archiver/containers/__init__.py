"""Bundles on disk: zip files, tar files and directories behind one interface, and the limits on what they may hold."""
