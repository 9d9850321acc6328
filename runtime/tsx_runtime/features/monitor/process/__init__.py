"""The program `tsx_runtime.features.monitor.process.main`, the monitor process of a server."""
