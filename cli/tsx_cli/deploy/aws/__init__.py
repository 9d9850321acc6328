"""What the AWS targets share: session, policies, alarms, logs."""
