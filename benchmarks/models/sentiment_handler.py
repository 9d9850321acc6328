"""The model of sentiment.py as a TorchServe handler, without types."""

GOOD = {"good", "great", "fine", "nice", "excellent"}


def handle(data, context):
    if data is None:
        return None
    results = []
    for row in data:
        tokens = row["body"]["text"].lower().split()
        score = sum(token in GOOD for token in tokens) / (len(tokens) or 1)
        results.append({"label": "positive" if score > 0 else "negative", "score": score})
    return results
