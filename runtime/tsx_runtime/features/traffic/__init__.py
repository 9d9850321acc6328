"""The split of a model's requests between its versions, labels, and rollback."""
