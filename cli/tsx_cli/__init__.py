"""The commands of tsx."""

from tsx_runtime.shared.safe_path import is_command, remove_working_directory

# Every command imports this package before anything else.
if is_command():
    remove_working_directory()
