"""The commands of tsx."""

from tsx_runtime.shared.safe_path import is_command, leave_out_working_directory

if is_command():  # here, since every command imports this before all else
    leave_out_working_directory()
