"""Files that outlive a process: the archive cache, locks, digests, atomic writes, private
directories.
"""
