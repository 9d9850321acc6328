"""The commands of tsx."""

from tsx_runtime.shared.safe_path import is_command, remove_working_directory

# Every command imports this package first, so the working directory never shadows a module.
if is_command():
    remove_working_directory()
