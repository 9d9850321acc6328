"""Numbers as people read them."""

from __future__ import annotations


def rounded(value: float) -> str:
    """Write four digits, or as many as a whole number has: 12,345; 1,234; 123.4."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
