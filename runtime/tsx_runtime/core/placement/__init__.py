"""The placement of workers on devices and cores."""
