"""How a batch goes through a handler."""
