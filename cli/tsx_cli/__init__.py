"""The commands of tsx."""

from tsx_runtime.shared.safe_path import is_command, remove_working_directory

if is_command():  # here, since every command imports this before all else
    remove_working_directory()
