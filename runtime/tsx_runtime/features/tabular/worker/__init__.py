"""The handler of models for tables, which predicts for the rows of all requests at once."""
