"""The parts of MANIFEST.json, for scripts that read or write one."""
