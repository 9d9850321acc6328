"""The stored results of a run: journal, archive record, comparisons."""
