"""What a run leaves behind: journal, archive record, comparisons, CloudWatch."""
