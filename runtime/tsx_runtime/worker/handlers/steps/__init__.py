"""Steps that handlers share: images, text, labels, explanations."""
