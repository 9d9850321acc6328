"""The least that a handler can do: what is left is the server's own work."""


def handle(data, context):
    if data is None:
        return None
    return ["OK"] * len(data)
