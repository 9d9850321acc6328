"""A typed Python file whose model does nearly nothing, so that its types are what costs time."""

from pydantic import BaseModel


class Text(BaseModel):
    text: str


class Label(BaseModel):
    label: str
    score: float


class Sentiment:
    def load(self, device: str) -> None:
        self.good = {"good", "great", "fine", "nice", "excellent"}

    def predict(self, batch: list[Text]) -> list[Label]:
        """Tell whether texts are positive."""
        labels = []
        for item in batch:
            tokens = item.text.lower().split()
            score = sum(token in self.good for token in tokens) / (len(tokens) or 1)
            labels.append(Label(label="positive" if score > 0 else "negative", score=score))
        return labels
