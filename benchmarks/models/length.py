"""Tells how long a body is: what is left is the work of moving it."""


def handle(data, context):
    if data is None:
        return None
    return [len(row["body"]) for row in data]
