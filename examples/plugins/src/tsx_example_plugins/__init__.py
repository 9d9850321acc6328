"""One plugin of each kind for tsx-serve; docs/plugins.md tells how they are loaded."""
