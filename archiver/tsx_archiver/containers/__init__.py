"""Zip and tar files behind one interface, with limits on their content."""
