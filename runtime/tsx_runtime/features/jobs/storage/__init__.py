"""The stores of jobs and of answers: SQLite and PostgreSQL."""
