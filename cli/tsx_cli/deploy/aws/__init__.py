"""Code that the AWS targets share: session, policies, alarms, logs."""
