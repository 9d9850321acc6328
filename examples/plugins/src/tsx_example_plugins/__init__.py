"""One plugin of each kind for tsx-serve; docs/guides/plugins.md tells how they are loaded."""
